"""Runs transformers' own model tests on every class of ScratchBert, or on those of BERT and BART as the yardsticks:
BART for the models with an encoder and a decoder, which are no classes of BERT's own.

The tests are those of the installed version of transformers. They come from its source distribution, are kept in a
cache folder and are no part of this repository.
"""

import argparse
import os
import subprocess
import sys
import tarfile
import tempfile
from importlib import metadata
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]

# What `--family bert`, once for its encoders and once for its decoders, and `--family bart` pass on a CPU: tests of the
# mixin and of ConfigTester, and for each kind two that test_conformance.py adds, `test_can_init_all_missing_weights`
# (which the mixin itself skips for models as old as these) and `test_output_shapes`. With fewer, some test passes our
# classes over.
LEAST_PASSED = {"bert": 107 + 107, "bart": 107, "scratchbert": 107 + 107 + 107}

# The name under which the tests are imported: they import one another relatively, and `tests` is our own folder.
PACKAGE = "transformers_tests"

# What the test files import, and the source distribution leaves out.
STUBS = {
    "exporters/test_export.py": "class ExportTesterMixin:\n    pass\n",
    "generation/test_utils.py": "class GenerationTesterMixin:\n    pass\n",
    # Fields of every configuration, each with a value that is not its default: ConfigTester checks that they arrive
    "utils/test_configuration_utils.py": """config_common_kwargs = {
    "return_dict": False,
    "output_hidden_states": True,
    "output_attentions": True,
    "dtype": "float16",
    "chunk_size_feed_forward": 5,
    "architectures": ["SomeModel"],
    "id2label": {0: "zero", 1: "one", 2: "two"},
    "label2id": {"zero": 0, "one": 1, "two": 2},
    "problem_type": "regression",
    "name_or_path": "some/model",
}
""",
}


class TestsUnavailableError(Exception):
    """transformers' tests could not be had; the message says why."""


def fetch_tests(cache: Path) -> Path:
    """The folder that holds `PACKAGE`, transformers' tests, for the import path; downloads it if `cache` lacks it.

    Raises:
        TestsUnavailableError: transformers is not installed, or its source distribution does not come or has no tests.
    """
    try:
        version = metadata.version("transformers")
    except metadata.PackageNotFoundError:
        raise TestsUnavailableError("transformers is not installed in this environment") from None
    folder = cache / f"transformers-{version}"
    if folder.exists():
        return folder
    print(f"fetching the tests of transformers {version}", flush=True)
    try:
        cache.mkdir(parents=True, exist_ok=True)
        # `folder` appears whole, by the last line, or not at all
        with tempfile.TemporaryDirectory(dir=cache) as scratch:
            unpacked = _unpack_tests(_download(version, Path(scratch)), version, Path(scratch))
            package = Path(scratch) / "import_path" / PACKAGE
            package.parent.mkdir()
            unpacked.rename(package)
            _add_stubs(package)
            package.parent.rename(folder)
    except (OSError, tarfile.TarError) as error:
        raise TestsUnavailableError(
            f"the tests of transformers {version} cannot be laid in {cache}: {error}"
        ) from error
    return folder


def _download(version: str, destination: Path) -> Path:
    """The source distribution of transformers `version`, from the package index that pip is set up with."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--no-binary", "transformers", "--dest", str(destination), f"transformers=={version}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    found = sorted(destination.glob("transformers-*.tar.gz"))
    if done.returncode or not found:
        why = "\n".join(done.stderr.strip().splitlines()[-5:])
        raise TestsUnavailableError(f"pip cannot download the source distribution of transformers {version}:\n{why}")
    return found[0]


def _unpack_tests(sdist: Path, version: str, destination: Path) -> Path:
    """The tests/ folder of `sdist`, the one thing that is unpacked from it."""
    tests = f"transformers-{version}/tests"
    with tarfile.open(sdist) as archive:
        members = [member for member in archive if member.name.startswith(f"{tests}/")]
        # "data" refuses links and paths that lead outside
        archive.extractall(destination, members=members, filter="data")
    if not (destination / tests / "test_modeling_common.py").is_file():
        raise TestsUnavailableError(f"{sdist.name} has no tests/test_modeling_common.py")
    return destination / tests


def _add_stubs(package: Path) -> None:
    """Fill in what the distribution lacks; what it has stays."""
    for name, text in STUBS.items():
        path = package / name
        path.parent.mkdir(exist_ok=True)
        (path.parent / "__init__.py").touch()
        if not path.exists():
            path.write_text(text)
    (package / "__init__.py").touch()


class PassCounter:
    """A pytest plugin that counts the tests that pass. Their subtests do not count."""

    passed = 0

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        is_test = report.when == "call" and not isinstance(report, pytest.SubtestReport)
        self.passed += is_test and report.passed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.epilog = "Any further arguments go to pytest."
    parser.add_argument("--family", choices=LEAST_PASSED, default="scratchbert", help="whose classes")
    parser.add_argument(
        "--cache", type=Path, default=ROOT / "build" / "conformance", help="where the fetched tests are kept"
    )
    options, pytest_arguments = parser.parse_known_args()

    try:
        import_path = fetch_tests(options.cache.resolve())
    except TestsUnavailableError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2

    os.environ["CONFORMANCE_FAMILY"] = options.family
    os.environ["HF_HUB_OFFLINE"] = "1"  # nothing is to wait for the network
    sys.path[:0] = [str(ROOT), str(import_path)]
    counter = PassCounter()
    settings = ["-c", str(HERE / "pytest.ini")]
    status = pytest.main([str(HERE / "test_conformance.py"), *settings, *pytest_arguments], plugins=[counter])
    least = LEAST_PASSED[options.family]
    if counter.passed < least:
        print(f"error: {counter.passed} tests passed; BERT and BART pass {least}", file=sys.stderr)
        return 1
    return 1 if status else 0


if __name__ == "__main__":
    sys.exit(main())
