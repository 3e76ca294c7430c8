"""Label texts with a run's best checkpoint: one line in, one line out, with the label and its probability.

python -m training.predict runs/RUN lines.txt
echo 'loop = get_running_loop()' | python -m training.predict runs/RUN
python -m training.predict runs/RUN --test        its accuracy on the run's test set, as training has reported it
"""

import argparse
import sys

import torch

from shared import cli
from shared.data import rank_loader
from shared.distributed import UsageError, Worker
from training import data, model, utils
from training.config import Config


def main() -> None:
    """Load the model with its vocabulary, and answer."""
    parser = cli.Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", help="folder or URI of the run's checkpoints")
    parser.add_argument(
        "file", nargs="?", help="a text a line; its escapes \\n stand for ends of lines (default: standard input)"
    )
    parser.add_argument("--test", action="store_true", help="print the accuracy on the run's test set instead")
    options = parser.parse_args()
    try:
        path, state = utils.best_state(cli.path_or_uri(options.run))
    except ValueError as error:
        raise UsageError(str(error)) from error
    config = Config.model_validate(state["config"])
    if state["vocabulary"] is None:
        raise UsageError(f"{path} was trained on synthetic data: it reads no texts")
    vocabulary = data.Vocabulary(**state["vocabulary"])
    network = model.build(config.model, len(vocabulary.tokens) + 2, len(vocabulary.labels))
    network.to(next(iter(state["model"].values())).dtype).load_state_dict(state["model"])
    network.eval()
    if options.test:
        test = data.load(config, data.prepare(config)).test
        correct = sum(
            int((network(*inputs).argmax(dim=1) == labels).sum())
            for *inputs, labels in rank_loader(test, 256, Worker())
        )
        print(correct / len(test))
        return
    try:
        lines = open(options.file, encoding="utf-8") if options.file else sys.stdin  # noqa: SIM115
    except OSError as error:
        raise UsageError(f"{options.file}: {error.strerror}") from error
    for line in lines:
        probabilities = torch.softmax(network(*vocabulary.encode([line.replace("\\n", "\n")]))[0], dim=0)
        print(f"{vocabulary.labels[int(probabilities.argmax())]}\t{probabilities.max():.3f}\t{line.rstrip()}")


if __name__ == "__main__":
    with torch.no_grad():
        cli.run(main)
