// SPDX-License-Identifier: Apache-2.0
#include "core/check.hpp"
#include "core/log.hpp"
#include "group/control_plane.hpp"
#include "group/environment.hpp"
#include "group/rendezvous.hpp"
#include "group/secret.hpp"
#include "group/tcp_control.hpp"

namespace weft {

void check_rendezvous(const Rendezvous& rendezvous) {
  const Context context{rendezvous.rank, rendezvous.num_ranks, "tcp"};
  WEFT_CHECK_ARG(
      Context{},
      rendezvous.num_ranks >= 1,
      "connect: num_ranks = {} is too small (at least 1)",
      rendezvous.num_ranks
  );
  WEFT_CHECK_ARG(
      Context{},
      rendezvous.rank >= 0 && rendezvous.rank < rendezvous.num_ranks,
      "connect: rank {} is out of range (num_ranks = {})",
      rendezvous.rank,
      rendezvous.num_ranks
  );
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
