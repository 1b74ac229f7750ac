// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <utility>

#include "transport/faulty/faulty_transport.hpp"
#include "weft/error.hpp"

namespace weft {

TEST(FaultPlanTest, ReadsEveryKey) {
  const auto name = parse_faulty_name(
      "faulty:shm?seed=7&drop=0.1&delay=0.2&fail=0.3&reorder=0.4&hold_us=900&hide_mapped=1"
  );
  ASSERT_TRUE(name.has_value());
  EXPECT_EQ(name->inner, "shm");
  EXPECT_EQ(name->plan.seed, 7U);
  EXPECT_EQ(name->plan.drop, 0.1);
  EXPECT_EQ(name->plan.delay, 0.2);
  EXPECT_EQ(name->plan.fail, 0.3);
  EXPECT_EQ(name->plan.reorder, 0.4);
  EXPECT_EQ(name->plan.hold, std::chrono::microseconds(900));
  EXPECT_TRUE(name->plan.hide_mapped);
}

TEST(FaultPlanTest, WithoutKeysDoesNoHarm) {
  const auto name = parse_faulty_name("faulty:auto");
  ASSERT_TRUE(name.has_value());
  EXPECT_EQ(name->inner, "auto");
  EXPECT_EQ(name->plan.drop + name->plan.delay + name->plan.fail + name->plan.reorder, 0.0);
  EXPECT_FALSE(name->plan.hide_mapped);
}

TEST(FaultPlanTest, LeavesOtherNamesAlone) {
  EXPECT_FALSE(parse_faulty_name("shm").has_value());
  EXPECT_FALSE(parse_faulty_name("").has_value());
  EXPECT_FALSE(parse_faulty_name("faulty").has_value());
}

TEST(FaultPlanTest, NamesWhatItCannotRead) {
  const std::pair<const char*, const char*> cases[] = {
      {"faulty:shm?dleay=0.1", "unknown key \"dleay\""},
      {"faulty:shm?delay=often", "delay = \"often\" is not a number"},
      {"faulty:shm?delay=", "delay = \"\" is not a number"},
      {"faulty:shm?delay", "delay = \"\" is not a number"},
      {"faulty:shm?drop=1.5", "drop = 1.5 is no probability"},
      {"faulty:shm?drop=-1", "drop = \"-1\" is not a number from 0 on"},
      {"faulty:shm?drop=nan", "drop = \"nan\" is not a number"},
      {"faulty:shm?seed=1e300", "seed = 1e+300 is too large"},
  };
  for (const auto& [name, expected] : cases) {
    try {
      static_cast<void>(parse_faulty_name(name));
      ADD_FAILURE() << name << " was accepted";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
      EXPECT_NE(std::string(error.what()).find(expected), std::string::npos) << error.what();
    }
  }
}

}  // namespace weft
