"""Options of the decoder, on simulated ranks; `tests/checks/ranks.py` has its meshes, experts and generated text."""

from spmd.parallel.decoder import DecoderConfig
from tests.checks.meshes import mesh
from tests.checks.samples import each
from tests.programs import decoder as programs


@each("options", [{"tied": True}, {"layer_norm": True, "swiglu": False}, {"kv_heads": 2}], ids=str)
def test_options_of_the_transformer(options):
    config = DecoderConfig(vocabulary=8, features=8, heads=4, layers=1, hidden=8, **options)
    programs.check_numbers(mesh(1), ({"shards": 2, "feats": 2}, 1), config)
