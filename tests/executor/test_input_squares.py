"""What the matrices are multiplied with, against hooks in transformers."""

from __future__ import annotations

import pytest
import torch

from lmoffload.executor import Engine
from tests.executor.plans import make_plan
from tests.executor.reference import load_reference, prompts


@pytest.mark.parametrize("family", ["llama", "phi3", "mixtral"])
def test_mean_squares_of_inputs(tiny, family):
    checkpoint = tiny(family, num_layers=2)
    texts, model, sums = prompts(checkpoint.shape.vocab_size, (30, 12, 5)), load_reference(checkpoint.path), {}

    def hook(name):
        def keep(_, inputs):
            rows = inputs[0].reshape(-1, inputs[0].shape[-1])
            total, count = sums.get(name, (0.0, 0))
            sums[name] = total + rows.double().square().sum(0), count + len(rows)

        return keep

    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(hook(f"{name}.weight"))
    with torch.no_grad():
        for text in texts:
            model(torch.tensor([text]))
    found = []
    for micro_batch, resident in ((1, None), (3, set())):
        plan = make_plan(checkpoint.shape, checkpoint.fingerprint, micro_batch=micro_batch, resident=resident)
        with Engine(checkpoint, plan) as engine:
            found.append(engine.input_squares(texts))
    matrices = {t.name for t in checkpoint.shape.tensors if t.is_matrix and t.layer is not None}
    assert set(found[0]) == matrices
    for name in matrices:
        assert found[0][name].shape == checkpoint.shape.by_name[name].shape[-1:]
        torch.testing.assert_close(found[1][name], found[0][name], rtol=1e-4, atol=1e-6)
        if name in sums:
            torch.testing.assert_close(found[0][name], (sums[name][0] / sums[name][1]).float(), rtol=1e-4, atol=1e-6)
    assert len(matrices & set(sums)) >= 8
