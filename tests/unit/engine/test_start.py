"""What the settings ask of an engine."""

import pytest

from cluster.core.config import ClusterConfig
from engine.messages import FolderModel, TracerModel
from engine.start import make_init, model_spec


@pytest.mark.parametrize(
    ("host", "devices", "expected"),
    [
        ("127.0.0.1", [], "lo"),
        ("::1", [], "lo"),
        ("localhost", [], "lo"),
        ("10.0.0.7", [], ""),
        ("127.0.0.1", ["eth1", "mlx5_0:1"], "eth1,mlx5_0:1"),
    ],
)
def test_the_transport_listens_no_further_than_the_worker(host: str, devices: list[str], expected: str) -> None:
    config = ClusterConfig.model_validate({"host": host, "transport": {"devices": devices}})
    assert make_init(config, "decode", "a", TracerModel()).transport_options["devices"] == expected


def test_pools_differ_where_the_settings_say_so() -> None:
    config = ClusterConfig.model_validate(
        {
            "engine": {"pool_tokens": 1000, "threads": 1},
            "pools": {"prefill": {"pool_tokens": 320, "threads": 2}},
            "transport": {"port_range": [7000, 7010]},
        }
    )
    prefill = make_init(config, "prefill", "a", TracerModel())
    decode = make_init(config, "decode", "a", TracerModel())
    assert (prefill.num_blocks, prefill.threads, prefill.slots) == (20, 2, 1)
    assert (decode.num_blocks, decode.threads, decode.slots) == (62, 1, 32)
    assert prefill.transport_options["port_range"] == "7000-7010"


def test_the_tracer_needs_no_folder_and_everything_else_does() -> None:
    assert isinstance(model_spec(ClusterConfig(model="tracer"), "", "decode"), TracerModel)
    config = ClusterConfig.model_validate({"engine": {"dtype": "float32", "max_context": 512}})
    spec = model_spec(config, "folder", "decode")
    assert spec == FolderModel("folder", "float32", 512, kv_dtype="float32")


def test_only_a_decode_worker_converts() -> None:
    pools = {"prefill": {"kv_dtype": "auto"}, "decode": {"kv_dtype": "int8"}}
    config = ClusterConfig.model_validate({"pools": pools, "handoff": {"convert": "kv_dtype"}})
    assert model_spec(config, "f", "prefill") == FolderModel("f", "bfloat16", kv_dtype="bfloat16")
    decode = FolderModel("f", "bfloat16", kv_dtype="int8", converts_from="bfloat16")
    assert model_spec(config, "f", "decode") == decode
