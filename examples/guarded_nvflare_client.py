"""The client script of the job in guarded_nvflare.py, in the form of NVFlare's hello-numpy.

Training adds one to all weights. The script does not know that there is a guard.
"""

import nvflare.client as flare


def main() -> None:
    flare.init()
    while flare.is_running():
        model = flare.receive()
        weights = {name: array + 1 for name, array in model.params.items()}
        metrics = {"weight_mean": float(sum(array.mean() for array in weights.values()))}
        flare.send(
            flare.FLModel(params=weights, metrics=metrics, current_round=model.current_round)
        )


if __name__ == "__main__":
    main()
