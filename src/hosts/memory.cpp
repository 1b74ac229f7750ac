// SPDX-License-Identifier: Apache-2.0
// The memory that calls between domains of GPUs share: how much, and how it grows.
#include <algorithm>

#include "core/log.hpp"
#include "core/size_class.hpp"
#include "hosts/exchange.hpp"

namespace weft {
void DomainsCudaExchange::make_room(Call call, int64_t bytes_of_token, cudaStream_t stream) {
  if (bytes_of_token <= token_bytes) {
    return;
  }
  call.token_room = bytes_of_token;
  network->run_call(
      call.op,
      [] { return 0; },
      [&](int /*nothing*/) {
        WEFT_CUDA(network->context(), cudaStreamSynchronize(stream));
        const std::vector<CallWord> to(
            static_cast<size_t>(network->context().num_ranks), network->new_word(call)
        );
        static_cast<void>(network->swap(to));
      }
  );
  reserve(bytes_of_token);  // nobody launches anything before the words of the call itself
}

// For as many tokens as each rank may ever have, all of them crossing.
void DomainsCudaExchange::reserve(int64_t bytes_of_token) {
  const Domains& domains = network->domains();
  token_bytes = bytes_of_token;
  room = crossing_room(
      {.num_others = static_cast<uint64_t>(domains.num_domains()) - 1,
       .num_carried = domains.carried().size(),
       .max_tokens = settings.max_tokens,
       .max_topk = settings.max_topk,
       .token_bytes = token_bytes}
  );
  reserve_staging(room.staging);
  reserve_messages(room.messages);
  retired.emplace_back(std::move(done));
  retired.push_back(std::move(work));
  done = std::make_unique<PinnedBuffer<uint32_t>>();
  done->create(room.num_messages, network->context());
  work = near->buffers->take(room.work);
}

// Falls back to the host's memory for good: what was refused once will be again.
std::optional<WireMemory> DomainsCudaExchange::take_direct(std::string_view what, uint64_t bytes) {
  if (!is_direct) {
    return {};
  }
  try {
    // Not cleared: that would be one more write that has to be waited for.
    std::byte* data = nullptr;
    WEFT_CUDA(network->context(), cudaMalloc(reinterpret_cast<void**>(&data), bytes));
    const std::shared_ptr<const void> owner(data, [](void* at) {
      static_cast<void>(cudaFree(at));
    });
    const Region region = network->parts().transport.lend(data, bytes, settings.device);
    return WireMemory{.data = data, .bytes = bytes, .lent = region.ref, .owner = owner};
  } catch (const Error& error) {
    log(LogLevel::kInfo, "exchange: {} by way of host memory: {}", what, error.what());
    is_direct = false;
    return {};
  }
}

void DomainsCudaExchange::retire(WireMemory& memory) {
  if (memory.is_lent()) {
    network->parts().transport.release(memory.lent);
  }
  retired_bytes += memory.bytes;
  retired.push_back(std::move(memory.owner));
  memory = {};
}

void DomainsCudaExchange::reserve_messages(uint64_t bytes) {
  retire(messages);
  if (auto direct = take_direct("messages", bytes)) {
    messages = std::move(*direct);
    return;
  }
  const auto buffer = std::make_shared<PinnedBuffer<std::byte>>();
  buffer->create(bytes, network->context());
  messages = {.data = buffer->get(), .bytes = bytes, .lent = {}, .owner = buffer};
}

// Copies out of host memory that is not pinned would not wait in the stream for what comes there.
void DomainsCudaExchange::reserve_staging(uint64_t bytes) {
  if (direct_staging.is_lent()) {
    retire(direct_staging);
    network->use_as_staging(nullptr, {});
  }
  if (auto direct = take_direct("staging", std::max(bytes, kLeastBytes))) {
    direct_staging = std::move(*direct);
    network->use_as_staging(direct_staging.data, direct_staging.lent);
    return;
  }
  if (pinned_staging != nullptr) {
    WEFT_CUDA(network->context(), cudaHostUnregister(const_cast<std::byte*>(pinned_staging)));
    pinned_staging = nullptr;
  }
  network->reserve_staging(std::max(bytes, kLeastBytes));
  WEFT_CUDA(
      network->context(),
      cudaHostRegister(network->staging(), network->staging_bytes(), cudaHostRegisterPortable)
  );
  pinned_staging = network->staging();
}

void DomainsCudaExchange::reserve_image(uint64_t bytes) {
  if (bytes > image_bytes) {
    image_bytes = size_class(std::max(bytes, kLeastBytes));
    retired.emplace_back(std::move(image));
    image = std::make_unique<PinnedBuffer<std::byte>>();
    image->create(image_bytes, network->context());
  }
}

}  // namespace weft
