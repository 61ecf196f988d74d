"""The sequences of a fine-tuning."""

from drot import CalibrationConfig, FinetuneConfig
from drot.checkpoint.load import load_tokenizer
from drot.finetuning.text import split_text
from drot.reporting.demo import HELD_OUT, MODEL


def test_a_short_text_that_is_read_many_times_is_told(tmp_path, caplog):
    (tmp_path / "short.txt").write_text(HELD_OUT.read_text()[:4000])
    text = CalibrationConfig(source=str(tmp_path / "short.txt"), nsamples=2000, seqlen=24)
    split_text(FinetuneConfig(text=text, held_out=2), load_tokenizer(MODEL))
    (record,) = caplog.records
    assert "tokens to train on: the training reads them about" in record.getMessage()
