"""The models: two for texts and one for synthetic data."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

from training import config as configuration
from training.data import FEATURES, PADDING


class TextRNN(nn.Module):
    """A recurrent network (GRU or LSTM) that classifies a text by its last hidden states, in one or two directions.

    Takes token ids (batch, length) and lengths (batch), and returns logits (batch, classes).
    """

    def __init__(self, config: configuration.Model, num_tokens: int, num_classes: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(num_tokens, config.embedding_dim, padding_idx=PADDING)
        self.dropout = nn.Dropout(config.dropout)
        self.rnn = {"gru": nn.GRU, "lstm": nn.LSTM}[config.cell](
            config.embedding_dim, config.hidden_dim, config.n_layers, batch_first=True,
            bidirectional=config.bidirectional, dropout=config.dropout if config.n_layers > 1 else 0.0,
        )  # fmt: skip
        self.directions = 2 if config.bidirectional else 1
        self.head = nn.Linear(self.directions * config.hidden_dim, num_classes)

    def forward(self, tokens: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        embedded = self.dropout(self.embedding(tokens))
        # Packed, so that the network skips the padding and its last state is that of the last token.
        packed = pack_padded_sequence(embedded, lengths.cpu(), batch_first=True, enforce_sorted=False)
        _, states = self.rnn(packed)
        states = states[0] if isinstance(states, tuple) else states  # an LSTM also returns its cell states
        last = states[-self.directions :].transpose(0, 1).flatten(1)
        return self.head(self.dropout(last))


class TextCNN(nn.Module):
    """A convolutional network over windows of three, four and five tokens, with max pooling over the text.

    Takes and returns the same shapes as TextRNN. After Kim, "Convolutional Neural Networks for Sentence
    Classification", 2014.
    """

    def __init__(self, config: configuration.Model, num_tokens: int, num_classes: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(num_tokens, config.embedding_dim, padding_idx=PADDING)
        self.filters = nn.ModuleList(nn.Conv1d(config.embedding_dim, config.hidden_dim, width) for width in (3, 4, 5))
        self.dropout = nn.Dropout(config.dropout)
        self.head = nn.Linear(3 * config.hidden_dim, num_classes)

    def forward(self, tokens: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        embedded = F.pad(self.embedding(tokens).transpose(1, 2), (2, 2))  # for texts of fewer than five tokens
        pooled = [F.relu(convolution(embedded)).amax(dim=2) for convolution in self.filters]
        return self.head(self.dropout(torch.cat(pooled, dim=1)))


def mlp(config: configuration.Model, num_classes: int) -> nn.Module:
    """Build a perceptron with n_layers hidden layers, from features (batch, 784) to logits (batch, classes)."""
    layers, width = [], FEATURES
    for _ in range(config.n_layers):
        layers += [nn.Linear(width, config.hidden_dim), nn.ReLU(), nn.Dropout(config.dropout)]
        width = config.hidden_dim
    return nn.Sequential(*layers, nn.Linear(width, num_classes))


def build(config: configuration.Model, num_tokens: int, num_classes: int) -> nn.Module:
    """Build the model that the configuration describes."""
    if config.kind == "mlp":
        return mlp(config, num_classes)
    return {"rnn": TextRNN, "cnn": TextCNN}[config.kind](config, num_tokens, num_classes)
