// SPDX-License-Identifier: Apache-2.0
#include "cuda/exchange/fault_text.hpp"

#include <bit>
#include <string_view>

#include "core/check.hpp"

namespace weft {
namespace {

constexpr std::string_view kWaitedFor[] = {  // by WaitFor
    "handshake",
    "routing",
    "records of the plan",
    "source weights",
    "rows",
    "copies",
    "the end of the call",
    "blocks of its own",
    "rows in its shared memory",
    "marks of rows"};
static_assert(std::size(kWaitedFor) == static_cast<size_t>(WaitFor::kMark) + 1);

// Names a signal's value: a call of this exchange, or what something else left there.
std::string signal_text(const RankView& me, uint32_t value) {
  const uint32_t number = call_number(me, value);
  return static_cast<int32_t>(number) >= 0 ? fmt::format("{}", number)
                                           : fmt::format("{:#x} (of another exchange)", value);
}

std::string timeout_text(
    const FaultRecord& fault, const RankView& me, const ControlSurvey& survey
) {
  std::string more;
  if (fault.waiting_for == WaitFor::kWord && !survey.words.empty()) {
    more += "; handshakes of all ranks:";
    for (const uint32_t word : survey.words) {
      more += fmt::format(" {}", signal_text(me, word));
    }
  }
  if (!survey.words.empty() && survey.stamp != me.stamp) {
    more += fmt::format(
        "; the control region at {:#x} has the stamp {:#x}, this exchange {:#x}",
        fault.control,
        survey.stamp,
        me.stamp
    );
  }
  const auto value = [&](int64_t number) {
    return fault.waiting_for >= WaitFor::kGrid ? fmt::format("{}", number)
                                               : signal_text(me, static_cast<uint32_t>(number));
  };
  if (fault.waiting_for == WaitFor::kMark) {
    return fmt::format(
        "rank {} waited {} ms for block {} of the rows of expert {} in call {} (its mark is {}, "
        "wanted {})",
        me.rank,
        me.timeout_ns / 1'000'000,
        fault.block,
        fault.what,
        call_number(me, fault.epoch),
        fault.seen,
        fault.wanted
    );
  }
  return fmt::format(
      "rank {} waited {} ms for {} of rank {} in call {} (seen {}, wanted {}{})",
      me.rank,
      me.timeout_ns / 1'000'000,
      name_of(fault.waiting_for, kWaitedFor),
      fault.peer,
      call_number(me, fault.epoch),
      value(fault.seen),
      value(fault.wanted),
      more
  );
}

std::string mismatch_text(const FaultRecord& fault, const RankView& me) {
  if (fault.what < 0) {
    return fmt::format(
        "rank {} calls {} (all ranks make the same calls in the same order; this is call {})",
        fault.peer,
        op_name(static_cast<Op>(fault.seen)),
        call_number(me, fault.epoch)
    );
  }
  const bool is_call = fault.op != Op::kPlan && fault.what == kPlanNumberWord;
  const auto value = [&](int64_t number) {
    return is_call ? call_number(me, static_cast<uint32_t>(number)) : number;
  };
  return difference_text(
      fault.op,
      static_cast<size_t>(fault.what),
      value(fault.wanted),
      value(fault.seen),
      static_cast<size_t>(fault.peer)
  );
}

// Describes a plan, graph or input that a call cannot use.
std::string input_text(const FaultRecord& fault, const RankView& me) {
  switch (fault.kind) {
    case FaultKind::kOldPlan:
      return "ranks were lost or came back since the plan was made (make it again)";
    case FaultKind::kOtherPlan:
      return fault.seen == 0 ? "the plan was never made (its call was given up, or is in a graph "
                               "that was not replayed)"
                             : "another plan lies in the memory of this one (the graph that makes "
                               "it has not been replayed since a graph that shares its memory)";
    case FaultKind::kOldGraph:
      return "a replayed graph was captured before a lost rank came back, whose memory has other "
             "addresses now (capture it again; with WEFT_GPU_TRANSPORT=vmm they stay)";
    case FaultKind::kOtherChoice:
      return fmt::format(
          "source_idx[{}, {}] = {} (the plan was made of {} there; this was call {})",
          fault.seen,
          fault.what,
          fault.wanted,
          fault.block,
          call_number(me, fault.epoch)
      );
    case FaultKind::kBadGlobalScale:
      return fmt::format(
          "global_scale = {} (expected more than 0, and finite; this was call {})",
          std::bit_cast<float>(static_cast<uint32_t>(fault.seen)),
          call_number(me, fault.epoch)
      );
    default:
      return fmt::format("a fault of kind {} (defect)", static_cast<uint32_t>(fault.kind));
  }
}

std::string problem_text(
    const FaultRecord& fault, const RankView& me, const ControlSurvey& survey
) {
  switch (fault.kind) {
    case FaultKind::kTimeout:
      return timeout_text(fault, me, survey);
    case FaultKind::kMismatch:
      return mismatch_text(fault, me);
    case FaultKind::kRefused:
      return fmt::format(
          "rank {} refused the call{}{}",
          fault.peer,
          survey.refusal.empty() ? "" : ": ",
          survey.refusal
      );
    case FaultKind::kBadIndex:
      return fmt::format(
          "topk_idx[{}, {}] = {} is out of range (num_experts = {}, -1 = no route)",
          fault.seen,
          fault.what,
          fault.wanted,
          me.map.num_experts
      );
    case FaultKind::kTooMany:
      return fmt::format("map[{}] names more than {} experts (max_topk)", fault.seen, fault.wanted);
    case FaultKind::kStranger:
      return fmt::format(
          "the handshake of rank {} in the control region at {:#x} is of another exchange (stamp "
          "{:#x}, expected {:#x})",
          fault.peer,
          fault.control,
          static_cast<uint64_t>(fault.seen),
          static_cast<uint64_t>(fault.wanted)
      );
    case FaultKind::kUnmapped:
      return fmt::format(
          "rank {} names its region {} (which is not mapped here)", fault.peer, fault.seen
      );
    case FaultKind::kGone:
      return fmt::format(
          "rank {} has broken off and did not wait for this call: its rows may be gone", fault.peer
      );
    default:
      break;
  }
  return input_text(fault, me);
}

}  // namespace

uint32_t call_number(const RankView& me, uint32_t epoch) {
  return epoch == 0 ? 0 : epoch - epoch_base(me.stamp);
}

std::string fault_text(const FaultRecord& fault, const RankView& me, const ControlSurvey& survey) {
  return fmt::format("{}: {}", op_name(fault.op), problem_text(fault, me, survey));
}

}  // namespace weft
