"""Importing and exporting a model that is much larger than what either may hold besides it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from moesaic.hf import export_decoder, load_decoder, safetensors_io
from moesaic.model.decoder import Decoder
from moesaic.spec.families import load_model_spec

CONFIG = {
    "model_type": "qwen3_moe",
    "vocab_size": 4096,
    "hidden_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "intermediate_size": 1024,
    "moe_intermediate_size": 256,
    "num_experts": 32,
    "num_experts_per_tok": 2,
}
MIB = 1 << 20

IMPORT = """
import json, resource, sys
from pathlib import Path
import torch
from moesaic.hf import export_decoder, load_decoder
from moesaic.model.decoder import Decoder
from moesaic.spec.families import load_model_spec
def peak():
    # The high-water mark of this process: ru_maxrss would start from that of the parent.
    line = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024
torch.set_num_threads(1)
before = peak()
decoder = load_decoder(sys.argv[1], torch.bfloat16 if sys.argv[3] == "bf16" else torch.float32)
size = sum(p.numel() * p.element_size() for p in decoder.parameters())
loaded = peak()
export_decoder(decoder, sys.argv[2])
print(json.dumps({"size": size, "import": loaded - before, "export": peak() - loaded}))
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from /proc")
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_peak_memory(tmp_path: Path, dtype: str) -> None:
    """A file of 230 MB, as fp32 and converted to bf16: the peak stays within a quarter of the model plus 40 MB."""
    decoder = Decoder(load_model_spec(CONFIG))
    for parameter in decoder.parameters():
        torch.nn.init.constant_(parameter, 0.01)
    export_decoder(decoder, tmp_path / "source")
    assert (tmp_path / "source" / "model.safetensors").stat().st_size > 200 * MIB
    run = [sys.executable, "-c", IMPORT, str(tmp_path / "source"), str(tmp_path / "out"), dtype]
    found = json.loads(subprocess.run(run, capture_output=True, text=True, check=True).stdout.splitlines()[-1])
    assert found["import"] < found["size"] * 1.25 + 40 * MIB
    assert found["export"] < found["size"] * 0.25 + 40 * MIB


def test_no_read_needs_more_than_a_buffer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a buffer of 4 KB every tensor passes in parts of at most 4 KB, or goes straight to its place."""
    small = {**CONFIG, "vocab_size": 97, "hidden_size": 96, "num_experts": 3, "num_hidden_layers": 1, "head_dim": 12}
    decoder = Decoder(load_model_spec(small))
    decoder.init_weights(3)
    monkeypatch.setattr(safetensors_io, "BUFFER_BYTES", 4096)
    export_decoder(decoder, tmp_path / "m")
    allocated = []
    empty = torch.empty

    def watch(*args, **kwargs):  # type: ignore[no-untyped-def]
        tensor = empty(*args, **kwargs)
        allocated.append(tensor.numel() * tensor.element_size())
        return tensor

    target = Decoder(decoder.spec, dtype=torch.bfloat16)
    monkeypatch.setattr(safetensors_io.torch, "empty", watch)
    from moesaic.hf import import_weights

    import_weights(tmp_path / "m", target)
    monkeypatch.undo()
    assert allocated and max(allocated) <= 4096
    expected = load_decoder(tmp_path / "m", torch.bfloat16).state_dict()
    assert all(torch.equal(expected[name], tensor) for name, tensor in target.state_dict().items())
