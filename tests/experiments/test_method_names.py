"""Every method that the papers compare with is part of fedsynth."""

from __future__ import annotations

from fedsynth.experiments.presets import preset, preset_names
from fedsynth.methods import METHODS

# The methods that the papers name, also those of which they print no numbers.
NAMED = {
    "FedDM, Table 1 and Sec. 4.5": "FedAvg FedProx FedNova SCAFFOLD FedDM REAL",
    "FedAF, Sec. 2 and 5.1": "FedAvg FedAvgM FedNova FedBN FedProx SCAFFOLD FedDyn FedDC MOON FedDF "
    "FedBE FedGen FedDM FedAF",
    "FedKF, Table I": "FedAvg FedGen CCVR FedDF FedProx MOON FedGKD q-FFL FedMGDA+ FedKF",
    "FedHydra, Sec. 1 and 4.1.3": "FedAvg FedDF DENSE FedBE FedGen FedProx FedNova SCAFFOLD "
    "FedCVAE-Ens FedCVAE-KD FedHydra",
    "overview, FedFM": "FedAvg FedAvgM FedProx SCAFFOLD FedDyn FedNova MOON FedFM FedFM-Lite",
    "overview, FedFA+": "FedAvg FedAvgM FedProx FedRobust FedBN FedMix FedSAM FedSR FPL FedHarmo "
    "FedFA+",
    "FedAF's successor at ICML 2026": "FedUSD",
}
# Names that the registry has in another form.
FORMS = {"q-ffl": "qffl", "fedmgda+": "fedmgda-plus", "fedfa+": "fedfa-plus"}
NOT_A_METHOD = {
    "fedusd": "its public code does not determine it (docs/decisions/papers.md)",
    "teacher": "FedKF's Table IV trains one network on all data",
    "fedkf-": "FedKF without regularisation, whose operations Table IX counts",
    "data-free student": "FedKF's Table IV distils that network",
}


def test_registry_has_methods_of_papers() -> None:
    named = {name.lower() for names in NAMED.values() for name in names.split()}
    missing = {name for name in named if FORMS.get(name, name) not in METHODS}
    assert missing == {"fedusd"}


def test_methods_of_published_numbers_can_be_run() -> None:
    """A word of published_results.csv is a method, or has a cell that runs one."""
    runs: dict[str, set[str | None]] = {}
    for table in map(preset, preset_names()):
        for cell in table.cells:
            found = runs.setdefault(cell.method, {cell.method} & METHODS.keys())
            if not table.refusal(cell):
                found.add(table.sections(cell)["run"].get("method"))
    missing = {word for word, found in runs.items() if not found or not found <= METHODS.keys()}
    assert missing == NOT_A_METHOD.keys() - {"fedusd"}
