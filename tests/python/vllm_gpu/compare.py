# SPDX-License-Identifier: Apache-2.0
"""How answers of two ways of vLLM agree. An answer is its tokens, and for each of them the best
tokens with their log-probabilities (vllm_whole/engines.py)."""

from dataclasses import asdict, dataclass, field

# The largest logits of the model are some 16, where bf16 has steps of 1/8: three of them.
NEAR_TIE = 0.375


@dataclass
class Parting:
    """The first token that differs: only there have both ways seen the same tokens before."""

    prompt: int
    step: int
    tokens: tuple[int, int]
    gap: float | None  # of the reference's log-probabilities; None: the other is none of its best

    @property
    def is_near_tie(self) -> bool:
        return self.gap is not None and self.gap <= NEAR_TIE

    def __str__(self) -> str:
        kind = "near tie" if self.is_near_tie else "DIFFERS"
        gap = "beyond the best" if self.gap is None else f"{self.gap:.4f} apart"
        first, second = self.tokens
        return f"{kind}: prompt {self.prompt}, step {self.step}: {first} or {second}, {gap}"


@dataclass
class Agreement:
    prompts: int = 0
    same_prompts: int = 0
    tokens: int = 0
    same_tokens: int = 0  # before partings
    same_bits: int = 0  # of log-probabilities of these
    largest: float = 0.0  # difference of these log-probabilities
    partings: list[Parting] = field(default_factory=list)

    @property
    def differs(self) -> bool:
        return any(not one.is_near_tie for one in self.partings)

    def row(self) -> dict:
        near = sum(one.is_near_tie for one in self.partings)
        counted = {"near_ties": near, "differences": len(self.partings) - near}
        return asdict(self) | counted | {"partings": [str(one) for one in self.partings]}


def compare(reference: list, got: list) -> Agreement:
    """The shorter of two answers says how many tokens count; both have all prompts."""
    found = Agreement()
    for prompt, ((wanted, best), (tokens, other)) in enumerate(zip(reference, got, strict=True)):
        length = min(len(wanted), len(tokens))
        parts = [at for at in range(length) if wanted[at] != tokens[at]]
        same = parts[0] if parts else length
        found.prompts += 1
        found.same_prompts += not parts
        found.tokens += length
        found.same_tokens += same
        for at in range(same):
            token = wanted[at]
            first, second = dict(best[at])[token], dict(other[at])[token]
            found.same_bits += first == second
            found.largest = max(found.largest, abs(first - second))
        if parts:
            known = dict(best[same])
            gap = known.get(tokens[same])
            gap = None if gap is None else known[wanted[same]] - gap
            pair = (wanted[same], tokens[same])
            found.partings.append(Parting(prompt, same, pair, gap))
    return found
