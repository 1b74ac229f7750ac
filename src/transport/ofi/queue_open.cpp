// SPDX-License-Identifier: Apache-2.0
// Set-up of a queue: its endpoint and whom it can reach.
#include <algorithm>
#include <rdma/fi_cm.h>
#include <rdma/fi_errno.h>
#include <utility>

#include "transport/ofi/queue.hpp"
#include "transport/ofi/queue_parts.hpp"

namespace weft::ofi {
namespace {

constexpr size_t kCompletionRoom = 16384;  // a guess; providers hold more back themselves

// Memory of GPUs is moved by cards or not at all. Providers that do not know the option are taken
// to have no other way. -> 0 or libfabric's error.
int require_cards(fid_ep& endpoint) {
  const int wanted = FI_HMEM_P2P_REQUIRED;
  const int result =
      fi_setopt(&endpoint.fid, FI_OPT_ENDPOINT, FI_OPT_FI_HMEM_P2P, &wanted, sizeof wanted);
  return result == -FI_ENOPROTOOPT || result == -FI_ENOSYS ? 0 : result;
}

}  // namespace

Queue::Queue(std::shared_ptr<Fabric> fabric, QueueEvents& events, int num_ranks)
    : fabric_(std::move(fabric)),
      events_(events),
      targets_(static_cast<size_t>(num_ranks), FI_ADDR_NOTAVAIL),
      flying_to_(static_cast<size_t>(num_ranks)),
      ring_(kRingBytes),
      operations_(std::clamp<size_t>(fabric_->info()->tx_attr->size, 1, kMaxFlying)),
      receives_(std::clamp<size_t>(fabric_->info()->rx_attr->size, 1, kNumReceives)) {
  open();
  space_ = std::make_unique<Space>(*fabric_);
  for (Operation& operation : operations_) {
    idle_.push_back(&operation);
  }
  for (size_t i = 0; i < receives_.size(); ++i) {
    receives_[i].data = space_->data.get() + kRingBytes + i * kMessageBytes;
    post_receive(receives_[i]);
  }
}

Queue::~Queue() = default;

void Queue::open() {
  const Context& context = fabric_->context();
  const std::string_view name = fabric_->name();
  fi_av_attr av_attr = {};
  av_attr.type = fabric_->info()->domain_attr->av_type;
  av_attr.count = targets_.size();
  fid_av* av = nullptr;
  check_call(context, name, "fi_av_open", fi_av_open(fabric_->domain(), &av_attr, &av, nullptr));
  addresses_.reset(av);

  fi_cq_attr cq_attr = {};
  cq_attr.size = kCompletionRoom;
  cq_attr.format = FI_CQ_FORMAT_DATA;
  cq_attr.wait_obj = FI_WAIT_FD;
  fid_cq* cq = nullptr;
  if (fi_cq_open(fabric_->domain(), &cq_attr, &cq, nullptr) == 0) {
    completions_.reset(cq);
    check_call(
        context, name, "fi_control(FI_GETWAIT)", fi_control(&cq->fid, FI_GETWAIT, &descriptor_)
    );
  } else {
    cq_attr.wait_obj = FI_WAIT_NONE;
    check_call(context, name, "fi_cq_open", fi_cq_open(fabric_->domain(), &cq_attr, &cq, nullptr));
    completions_.reset(cq);
  }

  fid_ep* ep = nullptr;
  check_call(
      context, name, "fi_endpoint", fi_endpoint(fabric_->domain(), fabric_->info(), &ep, nullptr)
  );
  endpoint_.reset(ep);
  check_call(context, name, "fi_ep_bind(av)", fi_ep_bind(ep, &av->fid, 0));
  check_call(context, name, "fi_ep_bind(cq)", fi_ep_bind(ep, &cq->fid, FI_TRANSMIT | FI_RECV));
  if (fabric_->gpu_memory_obstacle().empty() && fabric_->provider().reaches_gpus) {
    if (const int refusal = require_cards(*ep); refusal != 0) {
      fabric_->refuse_gpu_memory(fmt::format("fi_setopt(FI_HMEM_P2P): {}", error_text(refusal)));
    }
  }
  check_call(context, name, "fi_enable", fi_enable(ep));
}

Bytes Queue::address() const {
  Bytes name(256);
  size_t bytes = name.size();
  check_call(
      fabric_->context(),
      fabric_->name(),
      "fi_getname",
      fi_getname(&endpoint_->fid, name.data(), &bytes)
  );
  name.resize(bytes);
  return name;
}

void Queue::connect(int rank, const Bytes& address) {
  fi_addr_t& at = targets_[static_cast<size_t>(rank)];
  const int inserted = fi_av_insert(addresses_.get(), address.data(), 1, &at, 0, nullptr);
  check_call(
      fabric_->context(),
      fabric_->name(),
      fmt::format("fi_av_insert of the address of rank {}", rank),
      inserted == 1 ? 0 : (inserted < 0 ? inserted : -FI_EADDRNOTAVAIL)
  );
}

}  // namespace weft::ofi
