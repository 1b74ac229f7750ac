// SPDX-License-Identifier: Apache-2.0
#include "fabric_stream.hpp"

#include <cstring>
#include <rdma/fi_cm.h>
#include <rdma/fi_errno.h>
#include <rdma/fi_rma.h>
#include <thread>
#include <utility>

namespace weft::bench {

FabricStream::FabricStream(const Group& group, ofi::Fabric& fabric, uint64_t bytes)
    : fabric_(fabric), is_writer_(group.rank() == 0), memory_(bytes) {
  const auto check = [&](std::string_view call, int64_t result) {
    ofi::check_call(fabric_.context(), fabric_.name(), call, result);
  };
  fi_av_attr av_attr = {};
  fid_av* av = nullptr;
  check("fi_av_open", fi_av_open(fabric_.domain(), &av_attr, &av, nullptr));
  addresses_.reset(av);
  fi_cq_attr cq_attr = {};
  cq_attr.size = 4096;
  cq_attr.format = FI_CQ_FORMAT_DATA;
  fid_cq* cq = nullptr;
  check("fi_cq_open", fi_cq_open(fabric_.domain(), &cq_attr, &cq, nullptr));
  completions_.reset(cq);
  fid_ep* ep = nullptr;
  check("fi_endpoint", fi_endpoint(fabric_.domain(), fabric_.info(), &ep, nullptr));
  endpoint_.reset(ep);
  check("fi_ep_bind", fi_ep_bind(ep, &av->fid, 0));
  check("fi_ep_bind", fi_ep_bind(ep, &cq->fid, FI_TRANSMIT | FI_RECV));
  check("fi_enable", fi_enable(ep));
  registration_ =
      fabric_.add_memory({memory_.data(), bytes}, FI_WRITE | FI_REMOTE_WRITE, endpoint_.get());

  struct Hello {
    std::array<std::byte, 256> address = {};
    uint64_t base = 0;
    uint64_t key = 0;
  } hello;
  size_t address_bytes = hello.address.size();
  check("fi_getname", fi_getname(&ep->fid, hello.address.data(), &address_bytes));
  hello.base = fabric_.has_addresses() ? reinterpret_cast<uint64_t>(memory_.data()) : 0;
  hello.key = fi_mr_key(registration_.get());
  const auto hellos = group.all_gather(std::as_bytes(std::span(&hello, 1)));
  std::memcpy(&hello, hellos[is_writer_ ? 1 : 0].data(), sizeof hello);
  base_ = hello.base;
  key_ = hello.key;
  check("fi_av_insert", fi_av_insert(av, hello.address.data(), 1, &target_, 0, nullptr) - 1);
  void* descriptor = fi_mr_desc(registration_.get());
  check(
      "fi_recv", fi_recv(ep, receive_room_.data(), 64, descriptor, FI_ADDR_UNSPEC, &receive_notes_)
  );
}

void FabricStream::write(uint64_t bytes, uint64_t index) {
  const uint64_t offset = index % (memory_.size() / bytes) * bytes;
  const iovec source = {.iov_base = memory_.data() + offset, .iov_len = bytes};
  const fi_rma_iov place = {.addr = base_ + offset, .len = bytes, .key = key_};
  void* descriptor = fi_mr_desc(registration_.get());
  const fi_msg_rma message = {
      .msg_iov = &source,
      .desc = &descriptor,
      .iov_count = 1,
      .addr = target_,
      .rma_iov = &place,
      .rma_iov_count = 1,
      .context = &notes_[index % kWindow],
      .data = 1};
  for (;;) {
    const int64_t result =
        fi_writemsg(endpoint_.get(), &message, FI_COMPLETION | FI_REMOTE_CQ_DATA);
    if (result != -FI_EAGAIN) {
      ofi::check_call(fabric_.context(), fabric_.name(), "fi_writemsg", result);
      return;
    }
    num_left_ += poll();
  }
}

uint64_t FabricStream::poll() {
  std::array<fi_cq_data_entry, 32> entries;
  const int64_t count = fi_cq_read(completions_.get(), entries.data(), entries.size());
  if (count == -FI_EAGAIN) {
    std::this_thread::yield();  // the ranks may share a core
    return 0;
  }
  ofi::check_call(fabric_.context(), fabric_.name(), "fi_cq_read", count);
  return static_cast<uint64_t>(count);
}

void FabricStream::run(uint64_t bytes, uint64_t count) {
  uint64_t num_done = 0;
  if (!is_writer_) {
    while (num_done < count) {
      num_done += poll();
    }
    return;
  }
  for (uint64_t index = 0; num_done < count;) {
    if (index < count && index - num_done < kWindow) {
      write(bytes, index++);
    }
    num_done += poll() + std::exchange(num_left_, 0);
  }
}

}  // namespace weft::bench
