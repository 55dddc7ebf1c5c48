"""One of the processes of `test_pipeline_devices.py`: a stage of a pipeline on one CPU device of its own.

python pipeline_ranks.py PORT PROCESSES PROCESS FILE
"""

import sys
from pathlib import Path

from processes import CACHE

from multipod import runtime


def main() -> None:
    port, processes, process, file = sys.argv[1:]
    runtime.prepare(cpu_devices=1, cache=CACHE, processes=int(processes))
    runtime.keep_stdout_for_python()
    import jax

    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", int(processes), int(process))

    import numpy as np
    from pipeline_models import batches, pipe_of, trained

    weights = [trained(pipe_of(name, int(processes), 1), batches(3)) for name in ("1f1b", "pipemare")]
    if int(process) == 0:
        np.savez(Path(file), *jax.tree.leaves(weights))
    jax.distributed.shutdown()


if __name__ == "__main__":
    main()
