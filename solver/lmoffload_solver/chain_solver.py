"""HiGHS on the rows of a `ChainProgram`, and what its optimum says: the placement, the prices, the seconds of given placements."""

from __future__ import annotations

import numpy as np

from lmoffload_solver.chain_program import GB, TIERS, ChainProgram, ChainSolution
from lmoffload_solver.chain_terms import Array
from lmoffload_solver.program import _silent_stdout


def solve_program(program: ChainProgram) -> ChainSolution | None:
    """The optimum; None where the rows contradict each other."""
    import highspy  # its import takes a tenth of a second

    families = list(program.families())
    matrix = np.concatenate([rows.matrix for rows in families])
    lines, columns = np.nonzero(matrix)
    model = highspy.HighsLp()
    model.num_col_, model.num_row_ = program.num_variables, len(matrix)
    model.col_cost_, model.col_lower_, model.col_upper_ = program.cost, np.zeros(program.num_variables), program.upper
    model.row_lower_ = np.concatenate([rows.lower for rows in families])
    model.row_upper_ = np.concatenate([rows.upper for rows in families])
    model.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    model.a_matrix_.start_ = np.concatenate(([0], np.cumsum(np.bincount(lines, minlength=len(matrix)))))
    model.a_matrix_.index_, model.a_matrix_.value_ = columns, matrix[lines, columns]
    with _silent_stdout():
        solver = highspy.Highs()  # type: ignore[no-untyped-call]
        solver.silent()
        solver.setOptionValue("presolve", "off")  # takes longer than so few rows
        solver.passModel(model)
        solver.run()
    if solver.getModelStatus() != highspy.HighsModelStatus.kOptimal:
        return None
    solution = solver.getSolution()
    values = np.array(solution.col_value)
    names = [name for rows in families for name in rows.names]
    return solution_of(program, values, dict(zip(names, solution.row_dual, strict=True)))


def solution_of(program: ChainProgram, values: Array, duals: dict[str, float]) -> ChainSolution:
    """Variables by their names."""
    shares = values[: program.kv].reshape(-1, len(TIERS)).tolist()
    weights = {name: dict(zip(TIERS, row, strict=True)) for name, row in zip(program.classes, shares, strict=True)}
    kv = tuple(values[program.kv : program.streamed].tolist())
    total = max(0.0, float(program.cost @ values) - program.tie)
    return ChainSolution(total, weights, kv, duals)


def scaling_s(program: ChainProgram, solution: ChainSolution, resource: str) -> float:
    """Seconds of the job that scale with the slowness of the link up ("upload") or of the disk ("disk_read"), −dT / d ln(rate): each row's
    dual times what of it scales."""
    choices, steps, kv, duals = program.choices, program.choices.steps, np.array(solution.kv), solution.duals
    sizes, names = choices.sizes.classes, steps.names

    def prices(family: str) -> Array:
        return np.array([duals.get(f"{family}.{name}", 0.0) for name in names])

    staged = sum(sizes[c] * share["disk"] for c, share in solution.weights.items())
    nothing = np.zeros(len(names))
    if resource == "disk_read":
        rate = choices.read_bytes_per_s
        if not rate:
            return 0.0
        read = staged / rate + steps.read @ kv - np.where(steps.early, choices.early_bytes / rate, 0.0)
        scaling: dict[str, Array] = {"disk_read": read}
        total = prices("disk_read") @ read
    else:
        rate, slow = choices.upload_bytes_per_s, choices.contention
        moved = staged + sum(sizes[c] * share["host"] for c, share in solution.weights.items())
        up = moved / rate + steps.upload @ kv + steps.load_hidden - np.where(steps.early, choices.early_bytes / rate, 0.0)
        outputs = steps.attend_upload @ kv
        scaling = {"upload": up, "host_attention": outputs}
        beside, share = slow.compute * (1 - 1 / slow.read), slow.read * (1 - 1 / slow.compute)
        total = prices("upload") @ (up + beside * outputs) + prices("contended") @ (outputs + share * up)
        total += (prices("host_attention") + prices("path") / steps.num_batches) @ outputs + prices("serial").sum() * moved / rate
    for (first, second), slow in choices.crowded.items():
        one, other = scaling.get(first, nothing), scaling.get(second, nothing)
        total += prices(f"{first}+{second}") @ (one + slow.compute * (1 - 1 / slow.read) * other)
        total += prices(f"{second}+{first}") @ (other + slow.read * (1 - 1 / slow.compute) * one)
    return max(0.0, float(total))


def placed_s(program: ChainProgram, host_bytes: Array, disk_bytes: Array, kv: Array) -> Array:
    """Seconds that given placements do not go below: the program's rows with every fraction fixed.

    Args:
        host_bytes: of weights at home on the host, one for each placement.
        disk_bytes: on disk.
        kv: placements × `PLACES`, shares of keys and values.
    """
    num_steps = program.num_steps
    seconds = np.zeros((len(kv), num_steps))
    # The first class stands for all: in the rows of seconds bytes of every class weigh the same.
    weights = np.zeros((len(kv), program.num_variables))
    weights[:, 1], weights[:, 2] = host_bytes / GB / program.bytes[0], disk_bytes / GB / program.bytes[0]
    weights[:, program.kv : program.streamed] = kv
    for rows in program.families():
        if len(rows.names) >= num_steps and np.isfinite(rows.lower[0]) and rows.upper[0] == np.inf:
            least = rows.lower - weights @ rows.matrix.T
            for first in range(0, least.shape[1], num_steps):
                np.maximum(seconds, least[:, first : first + num_steps], out=seconds)
    return np.asarray(seconds @ program.choices.steps.weight)


def memory_prices(solution: ChainSolution) -> dict[str, float]:
    """Seconds that one more byte of device and of host memory saves."""
    return {tier: max(0.0, -solution.duals[f"capacity.{tier}"]) / GB for tier in ("device", "host")}
