"""Writes the models that fuzzing begins with: one for each case of the operators' tests, and some of several operators.

python c/fuzz/seeds.py DIR
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
import test_micro_audio
import test_micro_memory
import test_micro_more_operators
import test_micro_operators
import tflite_networks
from tflite_models import Tensor


def main() -> None:
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    models = [made()[0] for tests in (test_micro_operators, test_micro_more_operators)
              for family in tests.FAMILIES.values() for _, made in family()]  # fmt: skip
    models += [made()[0] for cases in (test_micro_audio.cases, test_micro_audio.streams)
               for _, made in cases()]  # fmt: skip
    models += tflite_networks.networks().values()
    models += [test_micro_memory.memory(), test_micro_memory.sums([0, 64, 0, 64])]
    models += [test_micro_memory.variable(Tensor([3]), once=once) for once in (False, True)]
    for number, model in enumerate(models):
        (folder / f"{number:03}.tflite").write_bytes(model)
    print(f"{len(models)} models in {folder}")


if __name__ == "__main__":
    main()
