// SPDX-License-Identifier: Apache-2.0
#include "nccl/nccl_rival_cuda.hpp"

#include <numeric>
#include <utility>

#include "core/gpu/check.hpp"

namespace weft::bench {
namespace {

size_t at(int rank) {
  return static_cast<size_t>(rank);
}

template <class T>
T* allocate(int64_t count) {
  void* data = nullptr;
  const auto bytes = static_cast<size_t>(count) * sizeof(T);
  WEFT_CUDA(Context{}, cudaMalloc(&data, bytes == 0 ? 16 : bytes));
  return static_cast<T*>(data);
}

}  // namespace

NcclGroup::NcclGroup(const NcclLibrary& library, int num_gpus)
    : library_(library), comms_(at(num_gpus)), streams_(at(num_gpus)) {
  std::vector<int> gpus(at(num_gpus));
  std::iota(gpus.begin(), gpus.end(), 0);
  for (int rank = 0; rank < num_gpus; ++rank) {
    WEFT_CUDA(Context{}, cudaSetDevice(rank));
    WEFT_CUDA(Context{}, cudaStreamCreateWithFlags(&streams_[at(rank)], cudaStreamNonBlocking));
  }
  library.check(
      library.api().comm_init_all(comms_.data(), num_gpus, gpus.data()), "ncclCommInitAll"
  );
}

NcclGroup::~NcclGroup() {
  for (int rank = 0; rank < num_gpus(); ++rank) {
    static_cast<void>(cudaSetDevice(rank));
    static_cast<void>(library_.api().comm_destroy(comms_[at(rank)]));
    static_cast<void>(cudaStreamDestroy(streams_[at(rank)]));
  }
}

void NcclGroup::exchange(
    const std::vector<const std::byte*>& from,
    const std::vector<const std::vector<Message>*>& outgoing,
    const std::vector<std::byte*>& to,
    const std::vector<const std::vector<Message>*>& incoming,
    int64_t row_bytes
) {
  const NcclApi& nccl = library_.api();
  const auto bytes = [&](int64_t rows) { return static_cast<size_t>(rows * row_bytes); };
  library_.check(nccl.group_start(), "ncclGroupStart");
  for (size_t rank = 0; rank < comms_.size(); ++rank) {
    for (const Message& message : *outgoing[rank]) {
      if (message.num_rows > 0) {
        const std::byte* data = from[rank] + message.row * row_bytes;
        const size_t count = bytes(message.num_rows);
        library_.check(
            nccl.send(data, count, kNcclByte, message.peer, comms_[rank], streams_[rank]),
            "ncclSend"
        );
      }
    }
    for (const Message& message : *incoming[rank]) {
      if (message.num_rows > 0) {
        std::byte* data = to[rank] + message.row * row_bytes;
        const size_t count = bytes(message.num_rows);
        library_.check(
            nccl.recv(data, count, kNcclByte, message.peer, comms_[rank], streams_[rank]),
            "ncclRecv"
        );
      }
    }
  }
  library_.check(nccl.group_end(), "ncclGroupEnd");
}

RivalPlan::RivalPlan(RivalWay way, std::vector<RivalLists> lists)
    : way_(way), lists_(std::move(lists)) {
  const auto upload = [&](const RowLists& list) {
    auto* rows = allocate<int32_t>(static_cast<int64_t>(list.rows.size()));
    memory_.push_back(rows);
    const size_t bytes = list.rows.size() * sizeof(int32_t);
    WEFT_CUDA(Context{}, cudaMemcpy(rows, list.rows.data(), bytes, cudaMemcpyHostToDevice));
    return DeviceLists{rows, list.size(), list.width};
  };
  for (size_t rank = 0; rank < lists_.size(); ++rank) {
    WEFT_CUDA(Context{}, cudaSetDevice(static_cast<int>(rank)));
    on_device_.push_back(
        {upload(lists_[rank].permute), upload(lists_[rank].place), upload(lists_[rank].padding)}
    );
  }
}

RivalPlan::~RivalPlan() {
  for (void* memory : memory_) {
    static_cast<void>(cudaFree(memory));
  }
}

RivalPlan::RivalPlan(RivalPlan&& other) noexcept
    : way_(other.way_),
      lists_(std::move(other.lists_)),
      on_device_(std::move(other.on_device_)),
      memory_(std::exchange(other.memory_, {})) {}

NcclRival::NcclRival(NcclGroup& group, const RivalCase& shape, const RivalSizes& sizes)
    : group_(group), shape_(shape) {
  for (int rank = 0; rank < shape.num_ranks; ++rank) {
    WEFT_CUDA(Context{}, cudaSetDevice(rank));
    const auto rows = [&](int64_t count) { return allocate<std::byte>(count * shape.row_bytes()); };
    matrices_.push_back(
        {rows(shape.num_tokens),
         rows(sizes.num_sent),
         rows(sizes.num_received),
         rows(sizes.num_rows),
         rows(shape.num_tokens)}
    );
  }
}

NcclRival::~NcclRival() {
  for (const Matrices& mine : matrices_) {
    for (std::byte* data : {mine.tokens, mine.sent, mine.received, mine.experts, mine.out}) {
      static_cast<void>(cudaFree(data));
    }
  }
}

void NcclRival::permute(const RivalPlan& plan, int rank) {
  const Matrices& mine = matrices(rank);
  WEFT_CUDA(Context{}, cudaSetDevice(rank));
  spread_rows(
      mine.sent, mine.tokens, plan.on_device(rank).permute, shape_.row_bytes(), group_.stream(rank)
  );
  WEFT_CUDA(Context{}, cudaGetLastError());
}

void NcclRival::place(const RivalPlan& plan, int rank) {
  const Matrices& mine = matrices(rank);
  const RivalPlan::OnDevice& lists = plan.on_device(rank);
  WEFT_CUDA(Context{}, cudaSetDevice(rank));
  spread_rows(mine.experts, mine.received, lists.place, shape_.row_bytes(), group_.stream(rank));
  zero_rows(mine.experts, lists.padding, shape_.row_bytes(), group_.stream(rank));
  WEFT_CUDA(Context{}, cudaGetLastError());
}

void NcclRival::take_back(const RivalPlan& plan, int rank) {
  const Matrices& mine = matrices(rank);
  WEFT_CUDA(Context{}, cudaSetDevice(rank));
  sum_rows(
      mine.received,
      mine.experts,
      plan.on_device(rank).place,
      shape_.row_bytes(),
      group_.stream(rank)
  );
  WEFT_CUDA(Context{}, cudaGetLastError());
}

void NcclRival::sum(const RivalPlan& plan, int rank) {
  const Matrices& mine = matrices(rank);
  WEFT_CUDA(Context{}, cudaSetDevice(rank));
  sum_rows(
      mine.out, mine.sent, plan.on_device(rank).permute, shape_.row_bytes(), group_.stream(rank)
  );
  WEFT_CUDA(Context{}, cudaGetLastError());
}

void NcclRival::travel(const RivalPlan& plan, bool is_forward) {
  std::vector<const std::byte*> from;
  std::vector<std::byte*> to;
  std::vector<const std::vector<Message>*> outgoing;
  std::vector<const std::vector<Message>*> incoming;
  for (int rank = 0; rank < shape_.num_ranks; ++rank) {
    const Matrices& mine = matrices(rank);
    std::byte* far = plan.way() == RivalWay::kPerExpert ? mine.experts : mine.received;
    from.push_back(is_forward ? mine.sent : far);
    to.push_back(is_forward ? far : mine.sent);
    const RivalLists& lists = plan.lists(rank);
    outgoing.push_back(is_forward ? &lists.outgoing : &lists.incoming);
    incoming.push_back(is_forward ? &lists.incoming : &lists.outgoing);
  }
  group_.exchange(from, outgoing, to, incoming, shape_.row_bytes());
}

void NcclRival::dispatch(const RivalPlan& plan) {
  for (int rank = 0; rank < shape_.num_ranks; ++rank) {
    permute(plan, rank);
  }
  travel(plan, true);
  for (int rank = 0; rank < shape_.num_ranks; ++rank) {
    place(plan, rank);
  }
}

void NcclRival::combine(const RivalPlan& plan) {
  for (int rank = 0; rank < shape_.num_ranks; ++rank) {
    take_back(plan, rank);
  }
  travel(plan, false);
  for (int rank = 0; rank < shape_.num_ranks; ++rank) {
    sum(plan, rank);
  }
}

}  // namespace weft::bench
