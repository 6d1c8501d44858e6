"""The trainable table: what it says is what trains."""

from pathlib import Path

import pytest
import torch

from normalign.training.optim import TrainableTable, update_ratio
from normalign.vlm.model import module_of

from ..conftest import TOWERS, Tiny
from .helpers import STAGE1, STAGE2, options, run, samples_of

RATES = [STAGE1, STAGE2, {"aligner": 1e-3}, {"vision": 1e-3, "language": 1e-3}]


@pytest.mark.parametrize("rates", RATES, ids=lambda rates: "+".join(rates))
@pytest.mark.parametrize("tower", [*TOWERS, "untied"])
def test_fault_15_exactly_what_the_table_says_changes_in_two_steps(
    tiny: Tiny, tmp_path: Path, rates: dict[str, float], tower: str
) -> None:
    model = tiny.model(tower=tower)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    chosen = options(learning_rate=rates, global_batch=3, epochs=1)
    run(model, samples_of(model, tiny.processor(tower), chosen), chosen, tmp_path)
    unused = {f"model.vision_tower.{name}" for name in model.model.unused_vision_parameters()}
    for name, parameter in model.named_parameters():
        trains = module_of(name) in rates and name not in unused
        assert torch.equal(before[name], parameter) != trains, name
        assert parameter.requires_grad == trains, name


@pytest.mark.parametrize("rates", RATES, ids=lambda rates: "+".join(rates))
def test_the_optimizer_passes_the_tables_own_check(tiny: Tiny, rates: dict[str, float]) -> None:
    chosen = options(learning_rate=rates, weight_decay=0.1)
    table = TrainableTable(tiny.model(), chosen)
    optimizer = table.optimizer(chosen)
    table.check(optimizer)
    for group in optimizer.param_groups:
        assert group["lr"] == rates[group["module"]]
        for parameter in group["params"]:
            assert group["weight_decay"] == (0.1 if parameter.ndim > 1 else 0.0)
    held = [id(p) for group in optimizer.param_groups for p in group["params"]]
    assert sorted(held) == sorted(id(p) for p in table.parameters())


def test_a_table_of_modules_without_parameters_is_refused(tiny: Tiny) -> None:
    with pytest.raises(ValueError, match=r"no parameters in aligner.*name one of vision, projector, language"):
        TrainableTable(tiny.model(aligner={"aligner": "none"}), options(learning_rate={"aligner": 1e-3}))


@pytest.mark.parametrize("tamper", ["rate", "missing", "frozen", "grad", "unused"])
def test_an_optimizer_that_differs_from_the_table_is_refused(tiny: Tiny, tamper: str) -> None:
    chosen = options(learning_rate=STAGE1 | {"vision": 1e-3})
    model = tiny.model()
    table = TrainableTable(model, chosen)
    optimizer = table.optimizer(chosen)
    group = next(g for g in optimizer.param_groups if g["module"] == "projector")
    if tamper == "rate":
        group["lr"] = 0.5
    elif tamper == "missing":
        group["params"].pop()
    elif tamper == "frozen":
        group["params"].append(model.get_input_embeddings().weight)
    elif tamper == "grad":
        model.get_input_embeddings().weight.requires_grad_(True)
    else:
        vision = next(g for g in optimizer.param_groups if g["module"] == "vision")
        vision["params"].append(next(iter(table.unused.values())))
    with pytest.raises(ValueError, match="nothing was trained"):
        table.check(optimizer)


def test_the_description_counts_every_parameter_once(tiny: Tiny) -> None:
    model = tiny.model()
    lines = TrainableTable(model, options(learning_rate=STAGE2 | {"vision": 2e-6})).describe().splitlines()[1:]
    cells = [line.split() for line in lines]
    assert sum(int(count.replace(",", "")) for _, count, _ in cells) == sum(p.numel() for p in model.parameters())
    assert {name: rate for name, _, rate in cells}["vision"] == "2e-06"
    assert {name: rate for name, _, rate in cells}["unused"] == "frozen"
    frozen = TrainableTable(model, options(learning_rate=STAGE1)).describe()
    assert [line.split()[-1] for line in frozen.splitlines()[1:]] == ["frozen", "0.001", "0.001", "frozen"]


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_the_update_ratio_is_that_of_the_weights_before_and_after_a_step(tiny: Tiny, decay: float) -> None:
    model = tiny.model()
    chosen = options(weight_decay=decay)
    optimizer = TrainableTable(model, chosen).optimizer(chosen)
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        members = [p for g in optimizer.param_groups if g["module"] == "projector" for p in g["params"]]
        for parameter in members:
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        before = [p.detach().double().clone() for p in members]
        optimizer.step()
        change = (
            sum(float((p.detach().double() - b).square().sum()) for p, b in zip(members, before, strict=True)) ** 0.5
        )
        size = sum(float(p.detach().double().square().sum()) for p in members) ** 0.5
        assert update_ratio(optimizer, "projector") == pytest.approx(change / size, rel=1e-3)
    assert update_ratio(optimizer, "language") == 0.0
