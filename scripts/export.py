#!/usr/bin/env python
"""Exports a ScratchBert or a BERT for other runtimes, and checks the result against the model.

    export.py my-classifier my-classifier-onnx --format onnx
    export.py google-bert/bert-base-uncased --output bert-openvino --format openvino
    export.py my-summariser my-summariser-torch --format torch

OUTPUT becomes a folder with the graph, which requires neither this package nor transformers, and, if MODEL has them,
the tokenizer, config.json (without references to the model's code) and generation_config.json:

    torch      model.pt2            torch.export.load(…).module()(input_ids=…, attention_mask=…, token_type_ids=…)
    aotinductor
               compiled_model.pt2   torch._inductor.aoti_load_package(…)(input_ids=…, …); machine code, for this
                                    processor and version of torch. Writing it requires a C++ compiler
    onnx       model.onnx           onnxruntime.InferenceSession(…).run(None, {"input_ids": …, …}); weights of more
                                    than 1.5 GB are beside it, in model.onnx.data
    openvino   openvino_model.xml   openvino.Core().compile_model(…, "CPU", {"INFERENCE_PRECISION_HINT": "f32"});
               openvino_model.bin   without the hint it computes in bfloat16 if the processor supports that

The inputs are integers, `input_ids`, `attention_mask` and `token_type_ids`, (batch, length) each; the outputs are
float32, under the names that the model gives them. Batch and length are dynamic, and so are the choices of a
multiple-choice model, (batch, choices, length). Outputs at padding have no meaning.

A seq2seq model becomes two graphs, encoder_model and decoder_model; the decoder's inputs are `input_ids`,
`attention_mask`, `encoder_hidden_states` (batch, source, width) and `encoder_attention_mask` (batch, source). It has no
cache: each step of a generation passes all tokens so far.

The written files are opened in their runtime and run on ragged batches of several shapes. If a number at a non-padding
token differs from the model's by more than 1e-4, nothing is written. OUTPUT appears, or is replaced, only when all
graphs agree.

Exit code: 0 exported, 1 the export disagrees with the model, 2 bad usage, a library or compiler that is not installed,
or a checkpoint that cannot be exported, 130 interrupted.
"""

import sys

from toolkit.cli import Parser


def make_parser() -> Parser:
    parser = Parser(__file__, __doc__, usage="%(prog)s MODEL OUTPUT --format FORMAT [--FLAG VALUE …]")
    parser.add_argument("model", metavar="MODEL", help="a ScratchBert or BERT checkpoint: a folder or a hub id")
    parser.add_output("OUTPUT", help="the folder to write")
    output = parser.group("output")
    output.add_argument(
        "--format", choices=("torch", "aotinductor", "onnx", "openvino"), required=True, help="the format to write"
    )
    output.add_argument("--overwrite", action="store_true", help="replace OUTPUT if it holds an export or a checkpoint")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code."""
    parser = make_parser()
    args = parser.parse_args(argv)

    def work() -> None:
        from toolkit.exporting import export

        export(args.model, args.output, args.format, overwrite=args.overwrite)

    return parser.run(
        work, interrupted=f"interrupted; {args.output} is unchanged", expected=(RuntimeError,), is_silent=True
    )


if __name__ == "__main__":
    sys.exit(main())
