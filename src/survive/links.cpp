// SPDX-License-Identifier: Apache-2.0
#include "survive/links.hpp"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <linux/sockios.h>
#include <set>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <thread>
#include <utility>

#include "core/env.hpp"
#include "group/agree.hpp"
#include "group/tcp/local_address.hpp"

namespace weft {
namespace {

// So many connections, or one for each rank if more, may be there without a proof of the token.
constexpr size_t kMostGuests = 64;
// Stands for the rank of a new process that only asks who there is.
constexpr int kAsker = -1;
// A connection that failed is tried again this often, at most.
constexpr auto kTryEvery = std::chrono::seconds(1);
// Above so many unsent bytes, a rank that is no member any more gets no further messages.
constexpr size_t kMostUnsent = 1 << 20;

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

// Returns a card's address, even if the card came over a network and lacks the final zero.
std::string address_of(const Links::Card& card) {
  return {card.address.data(), ::strnlen(card.address.data(), card.address.size())};
}

// Returns the secret that is proven to the rank that listens there.
Point secret_of(const Links::Token& token, const std::string& address, int port) {
  const auto bytes = value_bytes(token);
  std::string text(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  return point_of(text + endpoint_text(address, port));
}

Endpoint endpoint_of(const std::string& address, int port, const Context& context) {
  return resolve(address, port, context).front();
}

// An empty card names no place.
bool is_given(const Links::Card& card) {
  return card.port != 0;
}

}  // namespace

Links::Links(const Group& group, std::chrono::milliseconds timeout)
    : context_(context_of(group)),
      token_(random_value<Token>()),
      links_(static_cast<size_t>(group.num_ranks())),
      next_(links_.size()) {
  const Deadline deadline(timeout);
  token_ = gather_values(group, token_).front();
  agree(group, [&] { open_listener(group); });
  const std::vector<Bytes> cards = group.all_gather(value_bytes(own_card_));
  agree(group, [&] { connect_all(group, cards, deadline); });
}

Links::Links(const Group& group, const Token& token)
    : context_(context_of(group)),
      token_(token),
      links_(static_cast<size_t>(group.num_ranks())),
      next_(links_.size()) {
  open_listener(group);
}

void Links::open_listener(const Group& group) {
  event_ = Descriptor(
      WEFT_SYS(context_, ErrorCode::kNotAvailable, ::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK))
  );
  const std::string address = own_address(group);
  Socket listener = listen_on(address, 0, context_);
  address.copy(own_card_.address.data(), own_card_.address.size() - 1);
  own_card_.port = port_of(listener);
  own_card_.place = this_place();
  door_.emplace(
      std::move(listener),
      secret_of(token_, address_of(own_card_), own_card_.port),
      std::max(kMostGuests, links_.size())
  );
}

// The higher one of two ranks connects.
void Links::connect_all(
    const Group& group, std::span<const Bytes> cards, const Deadline& deadline
) {
  for (int rank = 0; rank < context_.num_ranks; ++rank) {
    const auto at = static_cast<size_t>(rank);
    Link& link = links_[at];
    link.card = block_value<Card>(cards[at], at, context_);
    link.is_awaited = rank != context_.rank;
    link.connects = rank < context_.rank;
    try_to_connect(link, deadline.left());
    if (group.topology().host_of[at] == this_host()) {
      watch(link);
    }
  }
  const Events nobody_asks = {.on_frame = {}, .on_question = [] { return Bytes(); }};
  for (;;) {
    move(nobody_asks);
    std::vector<int> absent;
    for (int rank = 0; rank < context_.num_ranks; ++rank) {
      const Link& link = links_[static_cast<size_t>(rank)];
      WEFT_CHECK(
          context_.without(rank),
          link.problem.empty(),
          ErrorCode::kNotAvailable,
          "survive: rank {} cannot be reached at {} ({})",
          rank,
          endpoint_text(address_of(link.card), link.card.port),
          link.problem
      );
      if (link.is_awaited) {
        absent.push_back(rank);
      }
    }
    if (absent.empty()) {
      break;
    }
    WEFT_CHECK(
        context_,
        !deadline.has_passed(),
        ErrorCode::kTimeout,
        "survive: {} did not connect in time",
        rank_list(absent)
    );
    std::vector<pollfd> entries = wanted();
    const auto time = std::min<std::chrono::milliseconds>(deadline.left(), kTryEvery);
    ::poll(entries.data(), entries.size(), static_cast<int>(time.count()));
  }
  std::ranges::for_each(links_, [](Link& link) { link.is_known = true; });
}

void Links::join(
    uint64_t life,
    std::span<const int> ranks,
    std::span<const uint64_t> lives,
    std::span<const Card> cards
) {
  own_life_ = life;
  for (size_t at = 0; at < links_.size(); ++at) {
    links_[at].life = lives[at];
    links_[at].card = cards[at];
  }
  for (const int rank : ranks) {
    const auto at = static_cast<size_t>(rank);
    Link& link = links_[at];
    link.is_awaited = true;
    link.connects = true;
    watch(link);
    try_to_connect(link);
  }
}

Bytes Links::ask(
    const std::string& address,
    int port,
    const Token& token,
    const Deadline& deadline,
    const Context& context
) {
  const Endpoint endpoint = endpoint_of(address, port, context);
  const Point secret = secret_of(token, address, port);
  const Claim claim = {.rank = kAsker, .num_ranks = context.num_ranks};
  for (;;) {
    Knock knock(endpoint, secret, claim, Deadline(std::min(kHandshakeTime, deadline.left())));
    const TalkState state = knock.finish();
    WEFT_CHECK(
        context,
        state != TalkState::kOtherSecret && (state == TalkState::kProven || knock.has_connected()),
        ErrorCode::kNotAvailable,
        "rejoin: none of the ranks is at {} ({}); ask a rank that is left for an invitation",
        endpoint_text(address, port),
        state == TalkState::kOtherSecret ? "another process is" : knock.problem()
    );
    Frame answer;
    if (state == TalkState::kProven &&
        receive_frame(knock.take_socket(), answer, deadline) == IoState::kDone) {
      return std::move(answer.payload);
    }
    WEFT_CHECK(
        context,
        deadline.left() > kAskEvery,
        ErrorCode::kTimeout,
        "rejoin: no answer from {} within {}{}",
        endpoint_text(address, port),
        seconds_text(deadline.timeout()),
        knock.problem().empty() ? "" : fmt::format(" ({})", knock.problem())
    );
    std::this_thread::sleep_for(kAskEvery);
  }
}

// Watches another process of this host; threads of this process end with it.
void Links::watch(Link& link) const {
  const ProcessPlace here = this_place();
  if (!link.card.place.shares_pids(here) || link.card.place.pid == here.pid) {
    return;
  }
  try {
    link.watch = ProcessWatch(static_cast<int32_t>(link.card.place.pid));
  } catch (const Error&) {  // its connection will tell
  }
}

std::vector<Links::Card> Links::cards() const {
  std::vector<Card> cards;
  std::ranges::transform(links_, std::back_inserter(cards), &Link::card);
  cards[static_cast<size_t>(context_.rank)] = own_card_;
  return cards;
}

void Links::take(int rank, uint64_t life, bool connects) {
  Link& link = links_[static_cast<size_t>(rank)];
  Link& next = next_[static_cast<size_t>(rank)];
  if (life < link.life && !next.line.socket.is_open()) {  // `link` is let in later than it seemed
    next = std::exchange(link, {});
  }
  if (link.line.socket.is_open()) {
    past_.push_back(std::exchange(link, {}));
  }
  if (next.life == life && next.line.socket.is_open()) {
    link = std::exchange(next, {});
  } else {
    link = {};
    link.life = life;
    link.has_ended = next.life == life && next.has_ended;
    if (next.life <= life) {
      next = {};
    }
  }
  link.is_awaited = !link.line.socket.is_open();
  link.connects = connects;
}

void Links::try_to_connect(Link& link, std::chrono::milliseconds patience) const {
  if (!link.is_awaited || !link.connects || link.has_ended || !is_given(link.card)) {
    link.knock.reset();
    return;
  }
  if (!link.knock) {
    if (Clock::now() < link.next_try) {
      return;
    }
    link.next_try = Clock::now() + kTryEvery;
    const std::string address = address_of(link.card);
    const int port = link.card.port;
    try {
      link.knock.emplace(
          endpoint_of(address, port, context_),
          secret_of(token_, address, port),
          Claim{.rank = context_.rank, .num_ranks = context_.num_ranks},
          Deadline(patience)
      );
    } catch (const Error&) {  // it is no address
      return;
    }
  }
  const TalkState state = link.knock->advance();
  if (state == TalkState::kWaiting) {
    return;
  }
  if (state == TalkState::kProven) {
    link.line.socket = link.knock->take_socket();
    link.is_awaited = false;
    const Introduction introduction = {.life = own_life_, .card = own_card_};
    const auto own = value_bytes(introduction);
    link.unsent.insert(link.unsent.begin(), own.begin(), own.end());
    push(link);
  }
  link.problem = link.knock->has_connected() ? "" : link.knock->problem();
  link.is_awaited = link.is_awaited && (link.problem.empty() || !link.was_turned_away);
  link.knock.reset();
}

void Links::dismiss(int rank) {
  Link& link = links_[static_cast<size_t>(rank)];
  link.is_dismissed = true;
  if (!link.line.socket.is_open()) {
    link.is_awaited = false;
    link.knock.reset();
    link.unsent.clear();
  }
}

void Links::learn(std::span<const uint64_t> lives, std::span<const Card> cards) {
  for (size_t at = 0; at < std::min({links_.size(), lives.size(), cards.size()}); ++at) {
    Link& link = links_[at];
    const bool is_new = link.life == lives[at] && is_given(cards[at]) && !is_given(link.card);
    if (!link.is_awaited || !is_new) {
      continue;
    }
    link.card = cards[at];
    watch(link);
    try_to_connect(link);
  }
}

void Links::let_in(const Events& events) {
  for (Guest& guest : door_->let_in()) {
    const Claim& claim = guest.claim();
    const bool is_one = claim.version == kProtocolVersion && claim.num_ranks == context_.num_ranks;
    if (is_one && claim.rank == kAsker) {
      answer(guest.take_socket(), events);
    } else if (is_one && claim.rank >= 0 && claim.rank < context_.num_ranks &&
               claim.rank != context_.rank) {
      arrivals_.push_back({.socket = guest.take_socket(), .rank = claim.rank});
    }
  }
  std::ranges::for_each(arrivals_, [&](Arrival& arrival) { seat(arrival, events); });
  std::erase_if(arrivals_, [](const Arrival& arrival) { return !arrival.socket.is_open(); });
}

void Links::answer(Socket socket, const Events& events) {
  Link& asker = past_.emplace_back();
  asker.line.socket = std::move(socket);
  queue(asker, FrameKind::kAgreed, events.on_question());
}

void Links::seat(Arrival& arrival, const Events& events) {
  const auto bytes = std::as_writable_bytes(std::span(&arrival.said, 1));
  const IoState state = receive_some(arrival.socket, bytes, arrival.done);
  if (state == IoState::kMore && !arrival.deadline.has_passed()) {
    return;
  }
  Socket socket = std::move(arrival.socket);
  if (state != IoState::kDone) {
    return;
  }
  const int rank = arrival.rank;
  const Introduction& said = arrival.said;
  Link& link = links_[static_cast<size_t>(rank)];
  if (said.life == link.life && link.is_awaited) {
    link.line.socket = std::move(socket);
    link.knock.reset();
    link.is_awaited = false;
    link.is_known = true;
    link.card = said.card;
    watch(link);
    push(link);
    return;
  }
  if (said.life == link.life && !link.other.socket.is_open()) {
    link.other.socket = std::move(socket);
    link.is_known = true;
    return;
  }
  if (turn_of(said.life) <= turn_of(link.life)) {
    if (said.life != link.life) {  // it hears that another process has had its turn
      answer(std::move(socket), events);
    }
    return;
  }
  // This rank may have yet to hear of the life before.
  Link& next = next_[static_cast<size_t>(rank)];
  read(rank, next, events);
  const bool is_free = !next.line.socket.is_open() || !next.watch.is_alive();
  if (is_free || turn_of(said.life) > turn_of(next.life)) {
    next = {};
    next.life = said.life;
    next.card = said.card;
    next.line.socket = std::move(socket);
    next.is_known = true;
    watch(next);
  }
}

void Links::send(int rank, FrameKind kind, std::span<const std::byte> payload) {
  queue(links_[static_cast<size_t>(rank)], kind, payload);
}

void Links::send_next(int rank, FrameKind kind, std::span<const std::byte> payload) {
  queue(next_[static_cast<size_t>(rank)], kind, payload);
}

void Links::queue(Link& link, FrameKind kind, std::span<const std::byte> payload) {
  const bool is_too_much = link.is_dismissed && link.unsent.size() > kMostUnsent;
  if ((!link.line.socket.is_open() && !link.is_awaited) || is_too_much) {
    return;
  }
  const bool was_empty = link.unsent.empty();
  const FrameHeader header = {.kind = kind, .code = 0, .bytes = payload.size()};
  const auto bytes = value_bytes(header);
  link.unsent.insert(link.unsent.end(), bytes.begin(), bytes.end());
  link.unsent.insert(link.unsent.end(), payload.begin(), payload.end());
  if (was_empty) {
    push(link);
    if (!link.unsent.empty()) {
      wake();
    }
  }
}

// Sends what the connection takes; its end is found by read_line().
void Links::push(Link& link) {
  size_t done = 0;
  while (link.line.socket.is_open() && done < link.unsent.size()) {
    const auto count = ::send(
        link.line.socket.get(), link.unsent.data() + done, link.unsent.size() - done, MSG_NOSIGNAL
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

void Links::close() {
  for (std::vector<Link>* const links : {&links_, &next_}) {
    std::ranges::for_each(*links, [](Link& link) { link = {}; });
  }
  past_.clear();
  arrivals_.clear();
  door_.reset();
}

bool Links::has_unsent() const {
  return std::ranges::any_of(links_, [](const Link& link) {
    int on_the_way = 0;
    return link.line.socket.is_open() &&
           (!link.unsent.empty() ||
            (::ioctl(link.line.socket.get(), SIOCOUTQ, &on_the_way) == 0 && on_the_way > 0));
  });
}

bool Links::has_ended(int rank) const {
  const Link& link = links_[static_cast<size_t>(rank)];
  return link.has_ended || !link.watch.is_alive();
}

bool Links::is_open(int rank) const {
  return links_[static_cast<size_t>(rank)].line.socket.is_open();
}

bool Links::is_awaited(int rank) const {
  return links_[static_cast<size_t>(rank)].is_awaited;
}

bool Links::has_next(int rank, uint64_t life) const {
  const Link& next = next_[static_cast<size_t>(rank)];
  return next.life == life &&
         turn_of(life) == turn_of(links_[static_cast<size_t>(rank)].life) + 1 &&
         next.line.socket.is_open() && next.watch.is_alive();
}

std::vector<pollfd> Links::wanted() const {
  std::vector<pollfd> entries = {{.fd = event_.get(), .events = POLLIN, .revents = 0}};
  const std::vector<pollfd> at_the_door = door_->wanted();
  entries.insert(entries.end(), at_the_door.begin(), at_the_door.end());
  for (const Arrival& arrival : arrivals_) {
    entries.push_back({.fd = arrival.socket.get(), .events = POLLIN, .revents = 0});
  }
  for (const std::vector<Link>* links : {&links_, &next_, &past_}) {
    for (const Link& link : *links) {
      if (link.line.socket.is_open()) {
        const int events = POLLIN | (link.unsent.empty() ? 0 : POLLOUT);
        entries.push_back(
            {.fd = link.line.socket.get(), .events = static_cast<short>(events), .revents = 0}
        );
      }
      if (link.other.socket.is_open()) {
        entries.push_back({.fd = link.other.socket.get(), .events = POLLIN, .revents = 0});
      }
      if (link.knock) {
        entries.push_back(link.knock->wanted());
      }
    }
  }
  return entries;
}

void Links::wake() const {
  static_cast<void>(::eventfd_write(event_.get(), 1));
}

void Links::read(int rank, Link& link, const Events& events) {
  push(link);
  read_line(rank, link, link.line, events);
  read_line(rank, link, link.other, events);
}

void Links::read_line(int rank, Link& link, Line& line, const Events& events) {
  for (const uint64_t life = link.life; link.life == life && line.socket.is_open();) {
    errno = 0;  // a side that has closed leaves it so
    const IoState state = line.reader.read_some(line.socket);
    if (state == IoState::kClosed) {
      const bool is_end = errno == 0 || errno == ECONNRESET || errno == EPIPE;
      link.has_ended = link.has_ended || (link.is_known && is_end);
      if (&line == &link.line) {
        link.unsent.clear();
        link.was_turned_away = !link.is_known && link.connects;
        link.is_awaited = link.was_turned_away && !link.is_dismissed;
      }
      line.socket.close();
    }
    if (state != IoState::kDone) {
      return;
    }
    link.is_known = true;
    const Frame frame = line.reader.take();
    events.on_frame(rank, life, frame);  // it may call take(), which changes the life
  }
}

void Links::move(const Events& events) {
  eventfd_t count = 0;
  static_cast<void>(::eventfd_read(event_.get(), &count));
  let_in(events);
  for (int rank = 0; rank < context_.num_ranks; ++rank) {
    read(rank, links_[static_cast<size_t>(rank)], events);
    read(rank, next_[static_cast<size_t>(rank)], events);
  }
  const Events not_heard = {.on_frame = [](int, uint64_t, const Frame&) {}, .on_question = {}};
  for (Link& link : past_) {
    read(-1, link, not_heard);
  }
  std::erase_if(past_, [](const Link& link) { return !link.line.socket.is_open(); });
  std::ranges::for_each(links_, [this](Link& link) { try_to_connect(link); });
}

}  // namespace weft
