// SPDX-License-Identifier: Apache-2.0
// The memory that calls between domains of GPUs share: how much, and how it grows.
#include <algorithm>

#include "core/log.hpp"
#include "core/size_class.hpp"
#include "hosts/exchange.hpp"

namespace weft {
void HostsExchange::make_room(Call call, int64_t bytes_of_token, cudaStream_t stream) {
  if (bytes_of_token <= token_bytes_) {
    return;
  }
  call.token_room = bytes_of_token;
  network_->run_call(
      call.op,
      [] { return 0; },
      [&](int /*nothing*/) {
        WEFT_CUDA(context(), cudaStreamSynchronize(stream));
        const std::vector<CallWord> to(
            static_cast<size_t>(context().num_ranks), network_->new_word(call)
        );
        static_cast<void>(network_->swap(to));
      }
  );
  reserve(bytes_of_token);  // nobody launches anything before the handshake of the call itself
}

// There is room for as many tokens as each rank may ever have, all of them inter-node tokens.
void HostsExchange::reserve(int64_t bytes_of_token) {
  const Domains& domains = network_->domains();
  token_bytes_ = bytes_of_token;
  room_ = room_of_calls(
      {.num_others = static_cast<uint64_t>(domains.num_domains()) - 1,
       .num_forwarded = domains.forwarded().size(),
       .max_tokens = settings_.max_tokens,
       .max_topk = settings_.max_topk,
       .token_bytes = token_bytes_}
  );
  reserve_staging(room_.staging);
  reserve_messages(room_.messages);
  retired_.emplace_back(std::move(done_));
  retired_.push_back(std::make_shared<Buffer>(std::move(work_)));
  done_ = std::make_unique<PinnedBuffer<uint32_t>>();
  done_->create(room_.num_messages, context());
  work_ = take_bytes(room_.work);
}

// Falls back to the host's memory for good: what was refused once will be again.
std::optional<WireMemory> HostsExchange::take_direct(std::string_view what, uint64_t bytes) {
  if (!is_direct_) {
    return {};
  }
  try {
    // Not cleared: that would be one more write that has to be waited for.
    std::byte* data = nullptr;
    WEFT_CUDA(context(), cudaMalloc(reinterpret_cast<void**>(&data), bytes));
    const std::shared_ptr<const void> owner(data, [](void* at) {
      static_cast<void>(cudaFree(at));
    });
    const Region region = network_->parts().transport.lend(data, bytes, settings_.device);
    return WireMemory{.data = data, .bytes = bytes, .lent = region.ref, .owner = owner};
  } catch (const Error& error) {
    log(LogLevel::kInfo, "exchange: {} by way of host memory: {}", what, error.what());
    is_direct_ = false;
    return {};
  }
}

void HostsExchange::retire(WireMemory& memory) {
  if (memory.is_lent()) {
    network_->parts().transport.release(memory.lent);
  }
  retired_bytes_ += memory.bytes;
  retired_.push_back(std::move(memory.owner));
  memory = {};
}

void HostsExchange::reserve_messages(uint64_t bytes) {
  retire(messages_);
  if (auto direct = take_direct("messages", bytes)) {
    messages_ = std::move(*direct);
    return;
  }
  const auto buffer = std::make_shared<PinnedBuffer<std::byte>>();
  buffer->create(bytes, context());
  messages_ = {.data = buffer->get(), .bytes = bytes, .lent = {}, .owner = buffer};
}

// Copies out of host memory that is not pinned would not wait in the stream for what comes there.
void HostsExchange::reserve_staging(uint64_t bytes) {
  if (direct_staging_.is_lent()) {
    retire(direct_staging_);
    network_->use_as_staging(nullptr, {});
  }
  if (auto direct = take_direct("staging", std::max(bytes, kLeastBytes))) {
    direct_staging_ = std::move(*direct);
    network_->use_as_staging(direct_staging_.data, direct_staging_.lent);
    return;
  }
  if (pinned_staging_ != nullptr) {
    WEFT_CUDA(context(), cudaHostUnregister(const_cast<std::byte*>(pinned_staging_)));
    pinned_staging_ = nullptr;
  }
  network_->reserve_staging(std::max(bytes, kLeastBytes));
  WEFT_CUDA(
      context(),
      cudaHostRegister(network_->staging(), network_->staging_bytes(), cudaHostRegisterPortable)
  );
  pinned_staging_ = network_->staging();
}

void HostsExchange::reserve_image(uint64_t bytes) {
  if (bytes > image_bytes_) {
    image_bytes_ = size_class(std::max(bytes, kLeastBytes));
    retired_.emplace_back(std::move(image_));
    image_ = std::make_unique<PinnedBuffer<std::byte>>();
    image_->create(image_bytes_, context());
  }
}

}  // namespace weft
