#!/usr/bin/env python
"""Uploads a saved model's folder to the Hub: weights, tokenizer, code, model card, evaluation results.

    push_to_hub.py my-model user/my-model --dry_run    lists the files that would be uploaded; no network
    push_to_hub.py my-model user/my-model --private
    push_to_hub.py my-model user/my-model --revision v2 --parity parity.json
    push_to_hub.py my-model somebody/a-model --pull_request

Everything is uploaded in one commit: either all files are uploaded or none. An interrupted push can be repeated; large
files that were uploaded are not sent again. Old weights in the repository are removed, even under other names.

The uploaded model card is FOLDER's README.md, with the repository's name in the code that opens the model. Missing
parts are added: metadata, code that opens the model, the results in metrics.json, and the table of --parity. FOLDER is
not changed.

Checkpoints, logs and predictions of the training, the optimizer's state, hidden files and files with secrets are not
uploaded.

The token, with write access, is that of `hf auth login` or of HF_TOKEN.

Exit code: 0 pushed, or nothing is new; 2 bad usage, or it cannot be pushed; 130 interrupted.
"""

import sys
from pathlib import Path

from toolkit.cli import CommandError, Parser


def make_parser() -> Parser:
    parser = Parser(__file__, __doc__, usage="%(prog)s FOLDER REPO [--FLAG VALUE …]")
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="the saved model")
    parser.add_argument("repo", metavar="REPO", help="the repository to push to: user/name")
    output = parser.group("output")
    visibility = output.add_mutually_exclusive_group()
    visibility.add_argument("--private", action="store_true", default=None, help="make a new repository private")
    visibility.add_argument("--public", dest="private", action="store_false", help="make a new repository public")
    place = output.add_mutually_exclusive_group()
    place.add_argument("--revision", metavar="BRANCH", help="the branch, created if need be; default: main")
    place.add_argument("--pull_request", action="store_true", help="propose it to the repository's owner")
    output.add_argument(
        "--parity", metavar="FILE", type=Path, help="a file written by check_parity.py --json, for the model card"
    )
    output.add_argument("--message", default="Upload model", help="the commit message")
    output.add_argument("--dry_run", action="store_true", help="list the files that would be uploaded")
    return parser


def push(args) -> None:
    """Lists the files and uploads them.

    Raises:
        CommandError: they cannot be uploaded.
    """
    from huggingface_hub.errors import HTTPError
    from huggingface_hub.utils import disable_progress_bars

    from toolkit.publish import describe, explain, push, survey

    if not sys.stderr.isatty():
        disable_progress_bars()
    try:
        listing = survey(args.folder, args.repo, args.parity)
        print(describe(listing))
        if args.dry_run:
            print("dry run: nothing was uploaded")
            return
        commit, is_new = push(
            listing,
            args.repo,
            private=args.private,
            revision=args.revision,
            pull_request=args.pull_request,
            message=args.message,
        )
    except (OSError, ValueError, RuntimeError, HTTPError) as error:
        raise CommandError(explain(error, args.repo)) from error
    print(f"pushed to {commit.pr_url or commit}" if is_new else f"{args.repo} has all files already")


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code."""
    parser = make_parser()
    args = parser.parse_args(argv)
    interrupted = f"interrupted; run it again to push to {args.repo}"
    return parser.run(lambda: push(args), interrupted=interrupted, is_silent=True)


if __name__ == "__main__":
    sys.exit(main())
