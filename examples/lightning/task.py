from digits import DigitsData, LitDigits

from paramserver.integrations.lightning import LightningTask


class Digits(LightningTask):
    def __init__(self, width=64):
        super().__init__(LitDigits(width), DigitsData())
