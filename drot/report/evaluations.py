"""What was lost and won back: perplexities and agreement from the manifests' evaluations."""

from dataclasses import dataclass
from typing import Any

from drot.report.reading import Run


@dataclass(frozen=True)
class Measured:
    """The evaluation of one run on one text.

    text: name of the text. seqlen: tokens in a window.
    perplexity: of the run; None if it is not finite.
    dense: perplexity of the dense original; None if it was not measured.
    unrotated: perplexity of the same model pruned without a rotation; None if it was not measured.
    unrotated_name: where `unrotated` comes from.
    agreement: `equal_tokens`, `kl` and further figures of the agreement with the dense original; {} without.
    """

    text: str
    seqlen: int
    perplexity: float | None
    dense: float | None
    unrotated: float | None
    unrotated_name: str
    agreement: dict[str, Any]

    @property
    def share(self) -> float | None:
        """The share of the gap between not rotated and dense that the run closes; None if not known."""
        if None in (self.perplexity, self.dense, self.unrotated) or self.unrotated == self.dense:
            return None
        return (self.unrotated - self.perplexity) / (self.unrotated - self.dense)  # type: ignore[operator]


#: the text, its tokens and the windows of a measurement
_Key = tuple[str, str | None, int]


def measurements(run: Run, others: list[Run]) -> list[Measured]:
    """The evaluations of `run`, the latest of each text and window length.

    A perplexity of the dense original or without rotation may come from another run on the same model.
    """
    own, same_model = _latest(run), [other for other in others if _base(other) == _base(run)]
    found = []
    for key, entry in own.items():
        text, _, seqlen = key
        agreement = entry.get("agreement", {}).get(text) or {}
        dense = agreement.get("dense_perplexity", _baseline(entry, "dense", text))
        unrotated, name = _baseline(entry, "not_rotated", text), "measured with the run"
        for other in same_model:
            theirs = _latest(other).get(key)
            if theirs is None or other is run:
                continue
            if dense is None:
                dense = (theirs.get("agreement", {}).get(text) or {}).get(
                    "dense_perplexity", _baseline(theirs, "dense", text)
                )
            if unrotated is None and run.rotated and not other.rotated:
                unrotated, name = theirs["perplexity"].get(text), other.name
        found.append(Measured(text, seqlen, entry["perplexity"].get(text), dense, unrotated, name, agreement))
    return found


def tasks(run: Run) -> dict[str, float]:
    """Task → the latest accuracy of the run."""
    found: dict[str, float] = {}
    for entry in run.manifest.get("evaluations", []):
        found |= {task: value for task, value in (entry.get("tasks") or {}).items() if value is not None}
    return found


def _latest(run: Run) -> dict[_Key, dict[str, Any]]:
    found: dict[_Key, dict[str, Any]] = {}
    for entry in run.manifest.get("evaluations", []):
        for text in entry.get("perplexity") or {}:
            key = text, (entry.get("texts") or {}).get(text, {}).get("sha256"), entry.get("seqlen", 0)
            with_agreement = text in (entry.get("agreement") or {})
            if with_agreement or key not in found or text not in (found[key].get("agreement") or {}):
                found[key] = entry
    return found


def _baseline(entry: dict[str, Any], name: str, text: str) -> float | None:
    """The perplexity of the model `dense` or `not_rotated`, which an evaluation by the demo records."""
    return ((entry.get("baselines") or {}).get(name) or {}).get(text)


def _base(run: Run) -> str:
    return str(run.manifest.get("base_model"))
