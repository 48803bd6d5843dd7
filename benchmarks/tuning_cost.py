"""What choosing settings would cost on private data: all runs that are tried are composed.

    python benchmarks/tuning_cost.py [--candidates 6]

For the table of `dp_utility.py`: of each mechanism six candidates (three clips, two learning rates)
were run at ε = 3 on the same records. Clip and rate do not change ε, so all candidates have the
same rows in the ledger. No data are read.
"""

from __future__ import annotations

from fedsynth.federation.costs import plan_of
from fedsynth.federation.privacy_plan import PrivacyPlan
from fedsynth.privacy.accounting import calibrate_noise_multiplier, epsilon
from library.machine import plain_options
from library.private import CLIPS, METHODS, RATES, TUNE_ON, settings_for

TARGET = 3.0


def planned(mechanism: str) -> PrivacyPlan:
    """Returns the plan of a tuning run at ε = 3."""
    return plan_of(settings_for(TUNE_ON, mechanism, {"epsilon": TARGET}, 1.0, 1.0, seed=0))


def cost(mechanism: str, candidates: int) -> dict[str, float]:
    """Returns ε of one run, of all candidates, of one more, and of each if all had 3 together."""
    run = planned(mechanism)
    rows = run.planned()
    delta = run.privacy.delta
    sigma = calibrate_noise_multiplier(
        TARGET, delta, lambda s: (candidates + 1) * run.planned(None, s), run.privacy.adjacency
    )
    return {
        "one run": epsilon(rows, delta),
        "all candidates": epsilon(candidates * rows, delta),
        "and the run that is shown": epsilon((candidates + 1) * rows, delta),
        "a run's share of 3": epsilon(run.planned(None, sigma), delta),
    }


def main() -> None:
    parser = plain_options(__doc__)
    parser.add_argument("--candidates", type=int, default=len(CLIPS) * len(RATES))
    options = parser.parse_args()
    for mechanism in METHODS:
        figures = cost(mechanism, options.candidates).items()
        print(f"{mechanism:10}", *(f" {name} {value:.2f}" for name, value in figures))


if __name__ == "__main__":
    main()
