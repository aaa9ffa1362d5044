"""The ceiling of a machine: what its matrix products reach at a model's own shapes, one after the other.

`python -m speedproof.measure.matmul REQUEST RESULT`: one fresh process, since the thread count is the process's.
"""

import sys
import time
from pathlib import Path
from typing import Any

from speedproof.core import files
from speedproof.measure.isolate import die_with_parent
from speedproof.settings.recipe import ModelShape

Product = tuple[int, int, int]
"""(m, k, n) of an (m, k) by (k, n) product, 2mkn FLOPs."""

REPEATS = 3
LEAST_SECONDS = 0.2
"""A shape is repeated so often and so long at least; its best time counts, since a ceiling is asked for."""


def products(shape: ModelShape, rows: int, backward: bool) -> dict[Product, int]:
    """The products with weights of one pass over `rows` targets, each with how often it comes."""
    d, f, layers = shape.width, shape.ffn_width, shape.layers
    linears = {(d, d): 4 * layers, (d, f): 2 * layers, (f, d): layers, (d, shape.vocab_size): 1}
    found: dict[Product, int] = {}
    for (inner, outer), count in linears.items():
        wanted = [(rows, inner, outer)]
        if backward:  # by the input and by the weight
            wanted += [(rows, outer, inner), (outer, rows, inner)]
        for product in wanted:
            found[product] = found.get(product, 0) + count
    return found


def flops_per_s(counts: dict[Product, int], seconds: dict[Product, float]) -> float:
    """FLOPs of all products over the seconds that all of them take."""
    flops = sum(2.0 * m * k * n * count for (m, k, n), count in counts.items())
    return flops / sum(seconds[product] * count for product, count in counts.items())


def main(request_path: Path, result_path: Path) -> None:
    """FLOP/s by precision for a whole update and for the forward pass alone; null with a reason where unsupported."""
    die_with_parent()
    import torch

    from speedproof.training.precision import bf16_support

    request: dict[str, Any] = files.read_json(request_path)
    torch.set_num_threads(request["cpu_threads"])
    shape = ModelShape.parse(request["model"], "model")
    every = {back: products(shape, request["rows"], back) for back in (False, True)}
    result: dict[str, Any] = {}
    for precision, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        supported, reason = bf16_support(request["device"]) if precision == "bf16" else (True, "FP32")
        result[precision] = {"update": None, "forward": None, "reason": reason}
        if supported and precision in request["precisions"]:
            seconds = {product: _best_seconds(product, dtype, request["device"]) for product in every[True]}
            rates = {"update": flops_per_s(every[True], seconds), "forward": flops_per_s(every[False], seconds)}
            result[precision] |= rates
    files.write_json(result_path, result)


def _best_seconds(product: Product, dtype: Any, device: str) -> float:
    import torch

    from speedproof.training.window import synchronise

    m, k, n = product
    generator = torch.Generator().manual_seed(1)
    a = torch.randn(m, k, generator=generator).to(device, dtype)
    b = torch.randn(n, k, generator=generator).to(device, dtype).t()  # as a linear layer keeps its weight
    out = torch.empty(m, n, dtype=dtype, device=device)
    torch.mm(a, b, out=out)
    synchronise(out.device)
    times: list[float] = []
    while len(times) < REPEATS or sum(times) < LEAST_SECONDS:
        begin = time.perf_counter()
        torch.mm(a, b, out=out)
        synchronise(out.device)  # a GPU is only asked to multiply, and the call returns at once
        times.append(time.perf_counter() - begin)
    return min(times)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
