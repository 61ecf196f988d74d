"""The share of the damage of pruning that a better method undoes."""


def gap_closed(dense: float | None, baseline: float | None, model: float | None) -> float | None:
    """(baseline - model) / (baseline - dense), in perplexities on one text.

    1 is the dense model's perplexity, 0 the baseline's. None if a perplexity is not known, and if the
    baseline's pruning does no damage.

    dense: perplexity of the dense model.
    baseline: perplexity of the model that the baseline pruned, as without a rotation.
    model: perplexity of the model that is compared with the baseline.
    """
    if dense is None or baseline is None or model is None or baseline <= dense:
        return None
    return (baseline - model) / (baseline - dense)
