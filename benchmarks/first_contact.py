"""First contact with a GPU: is every form right there, and what does an update cost?

    python -m benchmarks.first_contact --out first_contact.json
    python -m benchmarks.first_contact --device cpu --small     # that it runs, without a GPU

At most nine minutes on one card. Times one update of `jaxcomp.powersgd` at ranks 4, 32 and 128 on
gradients of GPT-2 small, beside torch's `powerSGD_hook` with world size 1 and a bare copy of as
many words (`benchmarks.overhead` times the same, longer). Then every form of every reducer takes
four steps on the GPU and on the CPU, with ordinary and with hard gradients, and both must agree to
rounding. Each part is a process of its own with a time limit: one that breaks the driver's context
costs itself alone. What was found is written after every part, as one JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.common.arguments import call, command_line
from benchmarks.common.machine import describe
from benchmarks.common.paths import ROOT
from benchmarks.overhead.trees import gpt2, torch_layout

LIMITS = {"jax": 200, "torch": 60, "forms": 280}  # seconds of each part, in this order
RANKS = (4, 32, 128)
# How far the two may be apart, of the largest value: rounding that an orthogonalisation enlarges;
# one level of what is sent or kept in fewer bits.
EXACT, NARROW = 1e-3, 3e-2


def forms() -> dict[str, tuple[Any, str, float]]:
    """By name: a reducer, the dtype of the gradients, and how far GPU and CPU may be apart."""
    import jaxcomp

    def powersgd(rank: int = 4, **options: Any) -> Any:
        given: dict[str, Any] = {"start_step": 0, "min_compression_rate": 0.0} | options
        return jaxcomp.powersgd(rank, axis_name="data", **given)

    int8 = jaxcomp.quantized_allreduce(axis_name="data")
    found: dict[str, tuple[Any, str, float]] = {
        "allreduce": (jaxcomp.allreduce(axis_name="data"), "float32", EXACT),
        "quantized_allreduce": (int8, "float32", NARROW),
        "error_feedback of int8": (jaxcomp.error_feedback(int8), "float32", NARROW),
        "gradients in bfloat16": (powersgd(), "bfloat16", NARROW),
    }
    found |= {f"rank {rank}": (powersgd(rank), "float32", EXACT) for rank in (1, 2, 4, 8, 32, 128)}
    exact: list[dict[str, Any]] = [{"start_step": 2}, {"warm_start": False}]
    exact += [{"error_feedback": False}, {"eps": 1e-8}]
    narrow: list[dict[str, Any]] = [{"comm_dtype": name} for name in ("bfloat16", "int8", "int6")]
    narrow += [{"residual_dtype": "bfloat16"}]
    for allowed, several in ((EXACT, exact), (NARROW, narrow)):
        for options in several:
            found[str(options)] = (powersgd(**options), "float32", allowed)
    return found


SHAPES = {
    "dense": (300, 270),
    "twin": (300, 270),
    "large": (1200, 1000),
    "embedding": (5003, 130),
    "conv": (3, 3, 64, 96),
    "bias": (9,),
}
KINDS = ("random", "zero", "collinear", "1e-30", "1e35", "nan")


def gradients(kind: str, seed: int, small: bool) -> Any:
    """Hard ones, too: without a direction, with one alone, at both ends of float32."""
    import numpy as np

    rng, grads = np.random.default_rng(seed), {}
    for name, shape in SHAPES.items():
        x = rng.normal(size=[min(n, 24) for n in shape] if small else shape)
        if kind == "zero":
            x = np.zeros_like(x)
        elif kind == "collinear" and x.ndim > 1:
            x = np.broadcast_to(x[..., :1], x.shape)
        elif kind.startswith("1e"):
            x = x * float(kind)
        elif kind == "nan" and name == "twin":
            x[3, 4] = np.nan
        grads[name] = np.asarray(x, np.float32)
    return grads


def four_steps(reducer: Any, dtype: str, device: Any, small: bool) -> Iterator[tuple[str, list]]:
    """For each kind of gradients the outputs of four steps and what is kept in the end."""
    import jax
    import jax.numpy as jnp

    import jaxcomp

    mesh = jax.sharding.Mesh([device], ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    # A loss whose gradient is what it is given.
    loss = lambda params, grads: sum(  # noqa: E731
        jnp.sum(p * g[0]) for p, g in zip(params.values(), grads.values(), strict=True)
    )
    averaged = jaxcomp.value_and_grad(loss, reducer, mesh=mesh)
    put = jax.sharding.NamedSharding(mesh, jax.P())
    params = jax.device_put(
        {k: jnp.zeros(x.shape, dtype) for k, x in gradients("zero", 0, small).items()}, put
    )
    step = jax.jit(lambda state, grads: averaged(state, params, grads))
    for kind in KINDS:
        state, seen = averaged.init(params), []
        for seed in range(4):
            grads = {
                k: jnp.asarray(x[None], dtype) for k, x in gradients(kind, seed, small).items()
            }
            (_, outputs), state = step(state, jax.device_put(grads, put))
            seen.append(jax.device_get(outputs))
        kept = jax.device_get(jaxcomp.consolidate(state))
        yield kind, [*seen, getattr(kept, "residual", None)]


def apart(one: Any, other: Any, largest: float = 0.0) -> float:
    """The largest difference of two trees, of their largest value; infinite if NaNs differ."""
    import jax
    import numpy as np

    worst = 0.0
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        if not np.array_equal(np.isnan(a), np.isnan(b)):
            return float("inf")
        a, b = np.nan_to_num(a), np.nan_to_num(b)
        scale = max(np.abs(a).max(initial=0), np.abs(b).max(initial=0), largest)
        worst = max(worst, float(np.abs(a - b).max(initial=0) / scale) if scale else 0.0)
    return worst


def compare_forms(small: bool) -> None:
    """Prints a line of JSON for each form: how far the GPU is from the CPU, by kind."""
    import jax
    import numpy as np

    there, here = jax.devices()[0], jax.devices("cpu")[-1]
    for name, (reducer, dtype, allowed) in forms().items():
        row: dict[str, Any] = {"form": name, "allowed": allowed, "apart": {}}
        start = time.monotonic()
        try:
            both = zip(four_steps(reducer, dtype, there, small),
                       four_steps(reducer, dtype, here, small), strict=True)  # fmt: skip
            for (kind, found), (_, wanted) in both:
                scale = max(np.nanmax(np.abs(x)) for x in gradients(kind, 0, small).values())
                outputs = apart(found[:4], wanted[:4])
                # Of a gradient of low rank nothing but rounding is left: seen beside the gradient.
                row["apart"][kind] = max(outputs, apart(found[4], wanted[4], scale) / 3)
            row["right"] = max(row["apart"].values()) <= allowed
        except Exception as error:  # the next form may work
            row |= {"right": False, "error": f"{type(error).__name__}: {str(error)[:300]}"}
        print(json.dumps(row | {"seconds": round(time.monotonic() - start, 1)}), flush=True)


def job(part: str, device: str, small: bool) -> tuple[list[str], str]:
    """The command of a part, and what it reads from standard input."""
    if part == "forms":
        return ["-m", "benchmarks.first_contact", "--part-forms", *["--small"] * small], ""
    shapes = gpt2(2, 64) if small else gpt2(12, 768)
    content = {
        "shapes": torch_layout(shapes) if part == "torch" else shapes,
        "ranks": RANKS,
        "steps": 3 if small else 30,
        "warmup": 1 if small else 10,
        "platform": device,
        "residual_dtype": "float32",
    }
    return ["-m", f"benchmarks.overhead.{part}_worker"], json.dumps(content)


def run_part(part: str, device: str, small: bool, seconds: float) -> dict[str, Any]:
    """What a part printed, line by line, and how it ended."""
    command, given = job(part, device, small)
    platforms = {"cpu": "cpu", "gpu": "cuda,cpu" if part == "forms" else "cuda"}[device]
    environment = {"JAX_PLATFORMS": platforms, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    start = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, *command],
        cwd=ROOT,
        env=os.environ | environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        said, errors = process.communicate(given, timeout=max(1.0, seconds))
    except subprocess.TimeoutExpired:
        process.kill()
        said, errors = process.communicate()
    lines = [json.loads(line) for line in said.splitlines() if line.endswith("}")]
    ended = {"code": process.returncode, "seconds": round(time.monotonic() - start, 1)}
    return ended | {"found": lines} | ({"errors": errors[-3000:]} if process.returncode else {})


def summary(parts: dict[str, Any]) -> str:
    """What a person wants to know first."""
    lines, times = [], {}
    for part in ("jax", "torch"):
        for found in parts.get(part, {}).get("found", []):
            if "seconds" in found:
                name = "copy" if found["kind"] == "copy" else part
                times[name, found["rank"]] = 1e3 * statistics.median(found["seconds"])
    for rank in RANKS:
        shown = [f"{n} {times[n, rank]:.2f} ms" for n in ("jax", "torch", "copy")
                 if (n, rank) in times]  # fmt: skip
        lines.append(f"rank {rank:3}: {', '.join(shown) or 'not measured'}")
    rows = parts.get("forms", {}).get("found", [])
    lines.append(f"{sum(row['right'] for row in rows)} of {len(rows)} forms are right")
    for row in rows:
        if not row["right"]:
            lines.append(f"  wrong: {row['form']}: {row.get('error') or row['apart']}")
    lines += [f"{name} ended with {part['code']}" for name, part in parts.items() if part["code"]]
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """The command line's entry point; 1 if a form is wrong or a part did not end well."""
    parser = command_line("benchmarks.first_contact", __doc__)
    parser.add_argument("--out", type=Path, default=Path("first_contact.json"), help="the JSON")
    parser.add_argument("--device", choices=["gpu", "cpu"], default="gpu")
    parser.add_argument("--small", action="store_true", help="tiny sizes, to see that it runs")
    parser.add_argument("--part-forms", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args(argv)
    if given.part_forms:
        compare_forms(given.small)
        return 0
    began, parts = time.monotonic(), {}
    for part, limit in LIMITS.items():
        # Nobody waits for a card where there is none.
        seconds = limit if given.device == "gpu" else 10 * limit
        parts[part] = run_part(part, given.device, given.small, seconds)
        content = {"machine": describe("benchmarks.first_contact", ["jax", "numpy"])}
        content |= {"seconds": round(time.monotonic() - began), "parts": parts}
        given.out.write_text(json.dumps(content, indent=1) + "\n")
    print(summary(parts))
    right = all(row["right"] for row in parts["forms"]["found"])
    return 0 if right and not any(part["code"] for part in parts.values()) else 1


if __name__ == "__main__":
    call(main)
