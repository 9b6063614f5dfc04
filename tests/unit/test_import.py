"""What the first public name imports, and what waits for its own name."""

from __future__ import annotations

import subprocess
import sys

LATER = ("checkpoint", "data", "debug", "foreign", "hf", "megatron", "run_ranks", "te", "functionalize")


def test_a_program_of_its_own_functions_imports_no_checkpoints_models_or_modules():
    program = f"""
import sys
import fsharding as fs
fs.make_train_step, fs.plan_layout, fs.adamw
slow = ["torch.distributed.checkpoint", "torch.distributed.fsdp", "torch._dynamo", "transformers"]
slow += ["fsharding.checkpoint", "fsharding.foreign", "fsharding.interop", "fsharding.contrib", "fsharding.apps"]
print([name for name in slow if name in sys.modules])
assert {{*{LATER}}} <= {{*fs.__all__}} & {{*dir(fs)}}
print([name for name in {LATER} if getattr(fs, name) is None])
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100, check=True)
    assert run.stdout.splitlines() == ["[]", "[]"]
