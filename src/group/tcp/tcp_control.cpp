// SPDX-License-Identifier: Apache-2.0
#include <memory>
#include <numeric>
#include <optional>
#include <poll.h>

#include "core/check.hpp"
#include "core/log.hpp"
#include "group/control_plane.hpp"
#include "group/environment.hpp"
#include "group/tcp/frame.hpp"
#include "group/tcp/rendezvous.hpp"

namespace weft {
namespace {

class TcpRoot {
 public:
  TcpRoot(std::vector<Socket> peers, std::chrono::milliseconds timeout)
      : peers_(std::move(peers)),
        context_{0, static_cast<int>(peers_.size()), "tcp"},
        timeout_(timeout) {}

  std::vector<Bytes> all_gather(std::span<const std::byte> block) {
    if (failure_) {
      failure_->raise(context_);
    }
    const Deadline deadline(timeout_);
    std::vector<Bytes> blocks(peers_.size());
    blocks[0].assign(block.begin(), block.end());
    collect(blocks, deadline);
    const Bytes packed = pack_blocks(blocks);
    for (int rank = 1; rank < context_.num_ranks; ++rank) {
      check(rank, send_frame(peer(rank), FrameKind::kBlocks, packed, deadline));
    }
    return blocks;
  }

 private:
  [[nodiscard]] const Socket& peer(int rank) const { return peers_[static_cast<size_t>(rank)]; }

  void collect(std::vector<Bytes>& blocks, const Deadline& deadline) {
    std::vector<FrameReader> readers(peers_.size());
    std::vector<int> absent(peers_.size() - 1);
    std::iota(absent.begin(), absent.end(), 1);
    while (true) {
      std::erase_if(absent, [&](int rank) {
        FrameReader& reader = readers[static_cast<size_t>(rank)];
        const IoState state = reader.read_some(peer(rank));
        if (state == IoState::kMore) {
          return false;
        }
        check(rank, state);
        blocks[static_cast<size_t>(rank)] = reader.take().payload;
        return true;
      });
      if (absent.empty()) {
        return;
      }
      if (deadline.has_passed()) {
        fail(late_failure(absent, timeout_));
      }
      std::vector<pollfd> entries;
      for (const int rank : absent) {
        entries.push_back({peer(rank).get(), POLLIN, 0});
      }
      poll(entries.data(), entries.size(), static_cast<int>(deadline.left().count()));
    }
  }

  void check(int rank, IoState state) {
    if (state == IoState::kMore) {
      fail(late_failure({&rank, 1}, timeout_));
    }
    if (state == IoState::kClosed) {
      fail(
          {ErrorCode::kPeerFailed,
           fmt::format("all_gather: rank {} left the group (its connection closed)", rank)}
      );
    }
  }

  // Ends the group: every rank is told, and every later call says the same.
  [[noreturn]] void fail(Failure failure) {
    failure_ = std::move(failure);
    for (int rank = 1; rank < context_.num_ranks; ++rank) {
      send_failure(peer(rank), *failure_);
    }
    failure_->raise(context_);
  }

  const std::vector<Socket> peers_;  // by rank
  const Context context_;
  const std::chrono::milliseconds timeout_;
  std::optional<Failure> failure_;
};

class TcpPeer {
 public:
  TcpPeer(Socket root, const Context& context, std::chrono::milliseconds timeout)
      : root_(std::move(root)), context_(context), timeout_(patience(timeout)) {}

  std::vector<Bytes> all_gather(std::span<const std::byte> block) {
    if (failure_) {
      failure_->raise(context_);
    }
    const Deadline deadline(timeout_);
    // If rank 0 takes no more, its last frame may still say why.
    static_cast<void>(send_frame(root_, FrameKind::kBlock, block, deadline));
    Frame frame;
    const IoState state = receive_frame(root_, frame, deadline);
    if (state == IoState::kMore) {
      fail(
          {ErrorCode::kTimeout,
           fmt::format(
               "all_gather: rank 0 did not answer within {} (it or another rank has not called)",
               seconds_text(timeout_)
           )}
      );
    }
    if (auto failure = state == IoState::kDone ? failure_in(frame) : std::nullopt) {
      fail(std::move(*failure));
    }
    auto blocks =
        state == IoState::kDone ? unpack_blocks(frame.payload, context_.num_ranks) : std::nullopt;
    if (!blocks) {
      fail({ErrorCode::kPeerFailed, "all_gather: rank 0 left the group (its connection closed)"});
    }
    return std::move(*blocks);
  }

 private:
  // Ends the group here; closing the connection lets rank 0 know.
  [[noreturn]] void fail(Failure failure) {
    failure_ = std::move(failure);
    root_.close();
    failure_->raise(context_);
  }

  Socket root_;
  const Context context_;
  const std::chrono::milliseconds timeout_;
  std::optional<Failure> failure_;
};

}  // namespace

AllGather make_tcp_root(std::vector<Socket> peers, std::chrono::milliseconds timeout) {
  const auto root = std::make_shared<TcpRoot>(std::move(peers), timeout);
  return [root](std::span<const std::byte> block) { return root->all_gather(block); };
}

AllGather make_tcp_peer(Socket root, const Context& context, std::chrono::milliseconds timeout) {
  const auto peer = std::make_shared<TcpPeer>(std::move(root), context, timeout);
  return [peer](std::span<const std::byte> block) { return peer->all_gather(block); };
}

void check_rendezvous(const Rendezvous& rendezvous) {
  const Context context{rendezvous.rank, rendezvous.num_ranks, "tcp"};
  check_place("connect", rendezvous.rank, rendezvous.num_ranks);
  WEFT_CHECK_ARG(
      context,
      rendezvous.secret.size() >= kMinSecretBytes,
      "connect: the secret has {} B (at least {})",
      rendezvous.secret.size(),
      kMinSecretBytes
  );
  WEFT_CHECK_ARG(
      context,
      rendezvous.port >= 1 && rendezvous.port <= 65535,
      "connect: port {} is out of range (1 to 65535)",
      rendezvous.port
  );
  WEFT_CHECK_ARG(
      context,
      rendezvous.timeout.count() > 0 && rendezvous.timeout <= std::chrono::seconds(1'000'000),
      "connect: timeout = {} ms is out of range (1 to 10^9)",
      rendezvous.timeout.count()
  );
}

Group connect_group(const Rendezvous& rendezvous, Socket listener) {
  const int rank = rendezvous.rank;
  const Context context{rank, rendezvous.num_ranks, "tcp"};
  set_log_rank(rank, rendezvous.num_ranks);
  auto control =
      rank == 0 ? make_tcp_root(admit_ranks(rendezvous, std::move(listener)), rendezvous.timeout)
                : make_tcp_peer(join_ranks(rendezvous), context, rendezvous.timeout);
  return make_group(rank, rendezvous.num_ranks, std::move(control));
}

Group Group::connect(const Rendezvous& rendezvous) {
  check_rendezvous(rendezvous);
  const Context context{rendezvous.rank, rendezvous.num_ranks, "tcp"};
  const bool is_root = rendezvous.rank == 0;
  return connect_group(
      rendezvous, is_root ? listen_on(rendezvous.address, rendezvous.port, context) : Socket()
  );
}

bool Group::is_launched() {
  return launched_ranks(Env::read()) > 1;
}

Group Group::from_env() {
  const Rendezvous rendezvous = rendezvous_from(Env::read());
  if (rendezvous.num_ranks == 1) {
    return std::move(local(1).front());
  }
  return connect(rendezvous);
}

}  // namespace weft
