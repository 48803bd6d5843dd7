"""Makes the `random-process` dictionary that the package ships (`library.dictionary`).

    python benchmarks/random_process.py

Everything is drawn from one seed; no data set is read. It takes half a minute, and writes the file
next to `fedsynth/features/random_process.py`. What the dictionary adds was measured by
`git show 04719c52:benchmarks/random_process_prior.py`.
"""

import torch
from safetensors.torch import save_file

from fedsynth.features.random_process import WEIGHTS
from library.dictionary import learn_dictionary


def main() -> None:
    torch.set_num_threads(1)
    dictionary = learn_dictionary()
    save_file({"mean": dictionary.mean, "atoms": dictionary.atoms.contiguous()}, WEIGHTS)


if __name__ == "__main__":
    main()
