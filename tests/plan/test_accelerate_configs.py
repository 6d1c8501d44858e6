"""The launch configurations, read as `accelerate launch` reads them."""

from pathlib import Path
from typing import Any

import pytest

from normalign.settings import load_profile

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "configs" / "accelerate"
PROCESSES = {"single_node_8gpu.yaml": (1, 8), "two_nodes_16gpu.yaml": (2, 16)}


def environment(file: str) -> dict[str, Any]:
    """What a launched process gets in its environment."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_multi_gpu_env

    arguments = ["--config_file", str(FOLDER / file), "--machine_rank", "1", "--main_process_ip", "10.0.0.1"]
    parsed = launch_command_parser().parse_args([*arguments, "-m", "components.stage1", "llama32_3b", "norm"])
    checked, _, _ = _validate_launch_command(parsed)
    assert checked.use_fsdp and not checked.cpu
    assert (checked.num_machines, checked.num_processes) == PROCESSES[file]
    return prepare_multi_gpu_env(checked)


@pytest.mark.parametrize("file", PROCESSES)
def test_a_configuration_launches_fsdp2_in_bf16_on_all_its_devices(file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from accelerate.utils import FullyShardedDataParallelPlugin

    made = environment(file)
    assert made["ACCELERATE_USE_FSDP"] == "true"  # what normalign.training.parallel shards on
    assert made["ACCELERATE_MIXED_PRECISION"] == "bf16"
    for name, value in made.items():
        if name.startswith("FSDP_"):
            monkeypatch.setenv(name, value)
    plugin = FullyShardedDataParallelPlugin()
    assert plugin.fsdp_version == 2 and plugin.reshard_after_forward is True
    # Otherwise only the first process would have weights: ours are sharded without being broadcast.
    assert plugin.cpu_ram_efficient_loading is False


@pytest.mark.parametrize("file", PROCESSES)
@pytest.mark.parametrize("profile", ["llama32_3b", "qwen25_7b"])
def test_a_configuration_has_the_devices_and_the_precision_of_the_papers_profiles(file: str, profile: str) -> None:
    settings = load_profile(profile, ROOT / "params.yaml")
    processes = PROCESSES[file][1]
    assert settings.compute.precision == "bf16"
    assert processes >= settings.compute.min_devices
    for options in (settings.stage1, settings.stage2):
        assert options.global_batch % (processes * options.micro_batch) == 0


def test_a_second_machine_differs_in_nothing_but_where_it_is() -> None:
    import yaml

    one, two = (yaml.safe_load((FOLDER / file).read_text()) for file in PROCESSES)
    assert one["fsdp_config"] == two["fsdp_config"]
    assert one["mixed_precision"] == two["mixed_precision"]
