# SPDX-License-Identifier: Apache-2.0
"""A plan, slow and obvious: NumPy arrays, one loop per rule, nothing shared with the library."""

import numpy as np


def round_up(rows, multiple):
    return -(-rows // multiple) * multiple


def routes_to(topk_idx, rank, experts_per_rank):
    """All routes to a rank as (source, token, k, local expert), by source, token, k."""
    found = []
    for source, table in enumerate(topk_idx):
        for token, k in np.argwhere((table >= 0) & (table // experts_per_rank == rank)):
            found.append((source, token, k, table[token, k] % experts_per_rank))
    return found


def largest_block(topk_idx, num_experts, pad):
    counts = np.zeros(num_experts, dtype=np.int64)
    for table in topk_idx:
        np.add.at(counts, table[table >= 0], 1)
    return max(round_up(int(count), pad) for count in counts)


def rank_major_slots(routes):
    """One row per (source, token), in that order."""
    arrivals = sorted({(source, token) for source, token, _, _ in routes})
    row = {arrival: i for i, arrival in enumerate(arrivals)}
    return [row[source, token] for source, token, _, _ in routes], len(arrivals)


def expert_slots(routes, experts_per_rank, pad, stride):
    """One row per route, grouped by expert. Returns slots, each block's begin, all rows."""
    counts = np.bincount([e for *_, e in routes], minlength=experts_per_rank).astype(np.int64)
    steps = [stride if stride else round_up(int(count), pad) for count in counts]
    begin = np.concatenate([[0], np.cumsum(steps)]).astype(np.int64)
    used = np.zeros(experts_per_rank, dtype=np.int64)
    slots = []
    for *_, expert in routes:
        slots.append(int(begin[expert] + used[expert]))
        used[expert] += 1
    return slots, begin, int(begin[-1])


def reference_plan(topk_idx, num_experts, layout, pad=1, stride=0, budget=None):
    """topk_idx: one [num_tokens, topk] array per rank, -1 = no route. Returns a dict per rank."""
    num_ranks = len(topk_idx)
    experts_per_rank = num_experts // num_ranks
    if layout == "expert_strided" and stride == 0:
        stride = largest_block(topk_idx, num_experts, pad)
    route_slots = [np.full(table.shape, -1, dtype=np.int64) for table in topk_idx]
    plans = []
    for rank in range(num_ranks):
        routes = routes_to(topk_idx, rank, experts_per_rank)
        if layout == "rank_major":
            slots, required = rank_major_slots(routes)
            begin = np.zeros(experts_per_rank + 1, dtype=np.int64)
        else:
            slots, begin, required = expert_slots(
                routes, experts_per_rank, pad, stride if layout == "expert_strided" else 0
            )
        num_rows = required if budget is None else budget
        kept = np.zeros(experts_per_rank, dtype=np.int64)
        arrivals = set()
        for (source, token, k, expert), slot in zip(routes, slots):
            limit = begin[expert + 1] if layout == "expert_strided" else num_rows
            if slot < limit:
                route_slots[source][token, k] = slot
                kept[expert] += 1
                arrivals.add((source, token))
        plans.append({
            "num_rows": num_rows,
            "rows_per_expert": kept.tolist(),
            # A block that lies behind the last row begins at the end.
            "expert_begin": np.minimum(begin[:-1], num_rows).tolist(),
            "arrivals_from": [sum(1 for s, _ in arrivals if s == r) for r in range(num_ranks)],
            "drops": int(len(routes) - kept.sum()),
        })
    for rank, plan in enumerate(plans):
        plan["route_slots"] = route_slots[rank].reshape(-1).tolist()
    return plans
