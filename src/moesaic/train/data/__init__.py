"""Training data: files to documents, documents to tokens, tokens to sequences, sequences to steps."""

from moesaic.train.data.bpe import train_bpe
from moesaic.train.data.build import Data, build_data
from moesaic.train.data.dataset import Batch, TokenDataset
from moesaic.train.data.errors import DataError
from moesaic.train.data.tokenizers import BytesTokenizer, JsonTokenizer, Tokenizer, load_tokenizer

__all__ = [
    "Batch",
    "BytesTokenizer",
    "Data",
    "DataError",
    "JsonTokenizer",
    "TokenDataset",
    "Tokenizer",
    "build_data",
    "load_tokenizer",
    "train_bpe",
]
