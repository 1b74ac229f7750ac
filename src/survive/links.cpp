// SPDX-License-Identifier: Apache-2.0
#include "survive/links.hpp"

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <set>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <utility>

#include "core/env.hpp"
#include "group/agree.hpp"
#include "group/control_plane.hpp"
#include "group/tcp/handshake.hpp"
#include "group/tcp/local_address.hpp"
#include "group/topology.hpp"

namespace weft {
namespace {

// Who connects and says nothing is none of the ranks.
constexpr auto kPatience = std::chrono::seconds(2);

// Where a rank can be reached.
struct Card {
  std::array<char, 64> address = {};
  int32_t port = 0;
  std::array<uint64_t, 4> token = {};  // rank 0's counts
  ProcessPlace place;
};

// The first bytes on a connection.
struct Introduction {
  Magic magic = kMagic;
  uint32_t version = kProtocolVersion;
  int32_t rank = 0;
  std::array<uint64_t, 4> token = {};
};

std::string own_address(const Group& group) {
  const auto& hosts = group.topology().host_of;
  const std::string wanted = Env::read().fabric_address.value_or("");
  WEFT_CHECK(
      context_of(group),
      !wanted.empty() || std::set(hosts.begin(), hosts.end()).size() == 1,
      ErrorCode::kNotAvailable,
      "survive: the ranks are on several hosts and WEFT_FABRIC_ADDRESS, the network to use, is not "
      "set"
  );
  return local_address(wanted);
}

}  // namespace

Links::Links(const Group& group, std::chrono::milliseconds timeout)
    : context_(context_of(group)),
      token_(random_value<std::array<uint64_t, 4>>()),
      links_(static_cast<size_t>(group.num_ranks())) {
  const Deadline deadline(timeout);
  Card card = {.token = token_, .place = this_place()};
  agree(group, [&] {
    event_ = Descriptor(
        WEFT_SYS(context_, ErrorCode::kNotAvailable, ::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK))
    );
    const std::string address = own_address(group);
    listener_ = listen_on(address, 0, context_);
    address.copy(card.address.data(), card.address.size() - 1);
    card.port = port_of(listener_);
  });
  const std::vector<Bytes> cards = group.all_gather(std::as_bytes(std::span(&card, 1)));
  agree(group, [&] { connect(group, cards, deadline); });
  listener_.close();
}

// The kernel takes connections before anybody accepts them: all ranks connect first.
void Links::connect(const Group& group, std::span<const Bytes> cards, const Deadline& deadline) {
  const ProcessPlace here = this_place();
  for (int rank = 0; rank < context_.num_ranks; ++rank) {
    const auto at = static_cast<size_t>(rank);
    const auto card = block_value<Card>(cards[at], at, context_);
    token_ = rank == 0 ? card.token : token_;
    const bool is_of_host = group.topology().host_of[at] == this_host();
    if (is_of_host && card.place.shares_pids(here) && card.place.pid != here.pid) {
      links_[at].watch = ProcessWatch(static_cast<int32_t>(card.place.pid));
    }
    if (rank >= context_.rank) {
      continue;
    }
    const std::string address = card.address.data();
    links_[at].socket = connect_to(resolve(address, card.port, context_).front(), deadline);
    WEFT_CHECK(
        context_.without(rank),
        links_[at].socket.is_open(),
        ErrorCode::kNotAvailable,
        "survive: rank {} cannot be reached at {} ({})",
        rank,
        endpoint_text(address, card.port),
        std::strerror(errno)
    );
    const Introduction own = {.rank = context_.rank, .token = token_};
    static_cast<void>(send_all(links_[at].socket, std::as_bytes(std::span(&own, 1)), deadline));
  }
  accept_higher(deadline);
}

void Links::accept_higher(const Deadline& deadline) {
  for (int num_missing = context_.num_ranks - 1 - context_.rank; num_missing > 0;) {
    WEFT_CHECK(
        context_,
        wait_readable(listener_, deadline),
        ErrorCode::kTimeout,
        "survive: {} ranks have not connected",
        num_missing
    );
    std::string host;
    Socket socket = accept_from(listener_, host);
    Introduction theirs;
    if (!socket.is_open() ||
        receive_all(socket, std::as_writable_bytes(std::span(&theirs, 1)), Deadline(kPatience)) !=
            IoState::kDone) {
      continue;
    }
    const bool is_rank = theirs.magic == kMagic && theirs.version == kProtocolVersion &&
                         theirs.token == token_ && theirs.rank > context_.rank &&
                         theirs.rank < context_.num_ranks;
    if (is_rank && !links_[static_cast<size_t>(theirs.rank)].socket.is_open()) {
      links_[static_cast<size_t>(theirs.rank)].socket = std::move(socket);
      --num_missing;
    }
  }
}

void Links::send(int rank, FrameKind kind, std::span<const std::byte> payload) {
  Link& link = links_[static_cast<size_t>(rank)];
  if (!link.socket.is_open()) {
    return;
  }
  const bool was_empty = link.unsent.empty();
  const FrameHeader header = {.kind = kind, .code = 0, .bytes = payload.size()};
  const auto bytes = std::as_bytes(std::span(&header, 1));
  link.unsent.insert(link.unsent.end(), bytes.begin(), bytes.end());
  link.unsent.insert(link.unsent.end(), payload.begin(), payload.end());
  if (was_empty) {
    push(link);
    if (!link.unsent.empty()) {
      wake();
    }
  }
}

// Its end is found by who reads.
void Links::push(Link& link) {
  size_t done = 0;
  while (done < link.unsent.size()) {
    const auto count = ::send(
        link.socket.get(), link.unsent.data() + done, link.unsent.size() - done, MSG_NOSIGNAL
    );
    if (count < 0 && errno == EINTR) {
      continue;
    }
    if (count < 0 && errno != EAGAIN && errno != EWOULDBLOCK) {
      done = link.unsent.size();
    }
    if (count < 0) {
      break;
    }
    done += static_cast<size_t>(count);
  }
  link.unsent.erase(link.unsent.begin(), link.unsent.begin() + static_cast<ptrdiff_t>(done));
}

bool Links::has_unsent() const {
  return std::ranges::any_of(links_, [](const Link& link) {
    return link.socket.is_open() && !link.unsent.empty();
  });
}

bool Links::has_ended(int rank) const {
  const Link& link = links_[static_cast<size_t>(rank)];
  return link.has_ended || !link.watch.is_alive();
}

std::vector<pollfd> Links::wanted() const {
  std::vector<pollfd> entries = {{.fd = event_.get(), .events = POLLIN, .revents = 0}};
  for (const Link& link : links_) {
    if (link.socket.is_open()) {
      const int events = POLLIN | (link.unsent.empty() ? 0 : POLLOUT);
      entries.push_back(
          {.fd = link.socket.get(), .events = static_cast<short>(events), .revents = 0}
      );
    }
  }
  return entries;
}

void Links::wake() const {
  static_cast<void>(::eventfd_write(event_.get(), 1));
}

void Links::end(Link& link, int error) {
  link.has_ended = error == 0 || error == ECONNRESET || error == EPIPE;
  link.unsent.clear();
  link.socket.close();
}

void Links::move(const std::function<void(int rank, const Frame& frame)>& on_frame) {
  eventfd_t count = 0;
  static_cast<void>(::eventfd_read(event_.get(), &count));
  for (int rank = 0; rank < context_.num_ranks; ++rank) {
    Link& link = links_[static_cast<size_t>(rank)];
    if (!link.socket.is_open()) {
      continue;
    }
    push(link);
    for (;;) {
      errno = 0;  // which a side that has closed leaves as it is
      const IoState state = link.reader.read_some(link.socket);
      if (state == IoState::kClosed) {
        end(link, errno);
      }
      if (state != IoState::kDone) {
        break;
      }
      on_frame(rank, link.reader.take());
    }
  }
}

}  // namespace weft
