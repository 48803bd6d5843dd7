"""The LSTM of FedProx and q-FFL for character and word sequences.

The sources are Li et al. 2020 (arXiv 1812.06127 and 1905.10497), their public code, and LEAF's.

All versions have an embedding, two LSTM layers, and one linear layer on the last output. They
differ in two sizes, which are settings here or follow from the data:

- Units in a layer (`width`): Shakespeare has 100 in FedProx's paper and 256 in FedProx's and
  q-FFL's code. Sent140 has 256 in the papers and 100 in the code.
- Embedding: characters have 8 values. Words have GloVe's 300 fixed values, which are then the data
  (`sent140-glove`). LEAF learns word vectors with as many values as a layer has units.

The public code for Sent140 has another linear layer with 30 values before the last one. Without a
nonlinearity between them, both are one linear map, so the first is left out.

As in TensorFlow's BasicLSTMCell, which the papers used, a cell has one bias vector. TensorFlow adds
1 to the forget gate. Here the bias of this gate starts at 1, which is the same function. Linear
weights start with Glorot's uniform distribution, as in TensorFlow. Embeddings start with torch's
normal distribution, with which learning starts in fewer steps.

Cells consist of linear layers, so DP-SGD obtains per-example gradients from the layers' inputs and
outputs, as for any other network. With equal weights, outputs match `torch.nn.LSTM` up to rounding.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fedsynth.errors import SettingError
from fedsynth.features.feature_map import Shape
from fedsynth.models.layers import EmbeddingNetwork
from fedsynth.privacy.row_products import PaddedLinear

CHARACTERS = 256  # the largest vocabulary whose tokens are characters, and not words
CHARACTER_SIZE = 8  # values in the embedding of a character


class LstmLayer(nn.Module):
    """An LSTM layer, which maps a sequence [N, T, D] to a sequence [N, T, width].

    The gates are in torch's order: input, forget, cell, output.
    """

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.inputs = PaddedLinear(inputs, 4 * width)
        self.recurrent = PaddedLinear(width, 4 * width, bias=False)
        nn.init.zeros_(self.inputs.bias)
        nn.init.ones_(self.inputs.bias[width : 2 * width])

    def forward(self, x_NTD: Tensor) -> Tensor:
        if self._can_fuse(x_NTD):
            weights = [self.inputs.weight, self.recurrent.weight, self.inputs.bias]
            zeros = x_NTD.new_zeros(1, x_NTD.shape[0], self.recurrent.in_features)
            no_bias = torch.zeros_like(self.inputs.bias)
            return torch.lstm(
                x_NTD,
                (zeros, zeros),
                [*weights, no_bias],
                has_biases=True,
                num_layers=1,
                dropout=0.0,
                train=self.training,
                bidirectional=False,
                batch_first=True,
            )[0]
        from_inputs = self.inputs(x_NTD)
        h = c = from_inputs.new_zeros(x_NTD.shape[0], self.recurrent.in_features)
        outputs = []
        for step in from_inputs.unbind(1):
            i, f, g, o = (step + self.recurrent(h)).chunk(4, dim=1)
            c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
            h = torch.sigmoid(o) * torch.tanh(c)
            outputs.append(h)
        return torch.stack(outputs, dim=1)

    def _can_fuse(self, x_NTD: Tensor) -> bool:
        """Returns True if torch's fused LSTM operation can be used instead of the LSTM cells.

        On a CPU, the operation takes an eighth of the time with 32 units and half with 256. DP-SGD
        needs the cells, whose layers it hooks.
        """
        watched = bool(self.recurrent._forward_hooks)
        return not (watched or x_NTD.is_cuda)


class Lstm(EmbeddingNetwork):
    """A network with two LSTM layers, which maps sequences to logits [N, classes].

    Sequences are tokens [N, 1, 1, T] or time series [N, C, 1, T] of vectors with C values. Tokens
    are rounded and clamped to the vocabulary, so that all inputs have an output.

    Args:
        image_shape: the record shape, (1, 1, T) or (C, 1, T).
        classes: the number of classes.
        width: the number of units in each layer.
        vocabulary: the number of tokens, or 0 for time series.

    Raises:
        SettingError: the records are images, not sequences.
    """

    def __init__(self, image_shape: Shape, classes: int, width: int, vocabulary: int = 0) -> None:
        super().__init__()
        inputs, height, length = image_shape
        if height != 1:
            reason = f"requires sequences of height 1, got height {height}. Choose another model"
            raise SettingError("model", "name", reason, value="lstm")
        self.vocabulary = vocabulary
        if vocabulary:
            inputs = CHARACTER_SIZE if vocabulary <= CHARACTERS else width
            self.embedding = nn.Embedding(vocabulary, inputs)
        self.layers = nn.Sequential(LstmLayer(inputs, width), LstmLayer(width, width))
        self.classifier = PaddedLinear(width, classes)
        nn.init.zeros_(self.classifier.bias)
        for layer in self.modules():
            if isinstance(layer, nn.Linear):
                nn.init.xavier_uniform_(layer.weight)
        self.embedding_size = width
        self.largest_activation = 4 * width * length

    def embed(self, x_NCHW: Tensor) -> Tensor:
        """Computes the second layer's last outputs, [N, width]."""
        if self.vocabulary:
            tokens = x_NCHW.flatten(1).round().long().clamp(0, self.vocabulary - 1)
            x_NTD = self.embedding(tokens)
        else:
            x_NTD = x_NCHW.flatten(2).transpose(1, 2)
        return self.layers(x_NTD)[:, -1]
