"""Bounded types of numbers in configs, so that nothing overflows on the device.

Whole numbers may be written as text ("8") or as 8.0, and real numbers as text too: YAML reads 1e-4
as text. True and false are not numbers.
"""

from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field


def _refuse_bool(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError(f"want a number, got {value}")
    return value


def _no_smaller_than(smallest: float) -> AfterValidator:
    """Refuses numbers that float32 may round to 0, but not 0 itself."""

    def check(number: float) -> float:
        if 0 < abs(number) < smallest:
            raise ValueError(f"want no number closer to 0 than {smallest}, got {number}")
        return number

    return AfterValidator(check)


_NUMBER = BeforeValidator(_refuse_bool)
_REAL = _no_smaller_than(1e-30)

# Whole numbers become int32 on the device, seeds uint32.
INT32_MAX = 2**31 - 1
Count = Annotated[int, Field(gt=0, lt=2**31), _NUMBER]
AtLeastTwo = Annotated[int, Field(gt=1, lt=2**31), _NUMBER]
NumLayers = Annotated[int, Field(gt=0, le=10_000), _NUMBER]
HeadDim = Annotated[Count, Field(multiple_of=2)]
CountOrZero = Annotated[int, Field(ge=0, lt=2**31), _NUMBER]
TokenId = Annotated[int, Field(ge=-1, lt=2**31), _NUMBER]  # some config.json write -1 for none
Devices = Annotated[int, Field(ge=-1, lt=2**31), _NUMBER]  # -1: the rest
Seed = Annotated[int, Field(ge=0, lt=2**32), _NUMBER]
NumTokens = Annotated[int, Field(gt=0, le=10**18), _NUMBER]  # stays on the host
Port = Annotated[int, Field(ge=0, lt=2**16), _NUMBER]
Depth = Annotated[int, Field(gt=0, le=1000), _NUMBER]  # each depth is compiled by itself
Lookup = Annotated[int, Field(ge=0, le=1000), _NUMBER]

# Real numbers become float32, in which 1e-45 is 0, 1e39 is infinite and 0.99999999 is 1.
Positive = Annotated[float, Field(gt=0, le=1e30), _NUMBER, _REAL]
PositiveOrZero = Annotated[float, Field(ge=0, le=1e30), _NUMBER, _REAL]
Fraction = Annotated[float, Field(ge=0, lt=1), _NUMBER, _REAL]
Probability = Annotated[float, Field(ge=0, le=1), _NUMBER, _REAL]
TopP = Annotated[float, Field(gt=0, le=1), _NUMBER, _REAL]
Decay = Annotated[float, Field(ge=0, le=0.999999), _NUMBER, _REAL]

# Scores stay finite with the largest bias and penalty at the lowest temperature.
Temperature = Annotated[float, Field(ge=0, le=1e6), _NUMBER, _no_smaller_than(1e-20)]
Penalty = Annotated[float, Field(gt=0, le=1e6), _NUMBER, _no_smaller_than(1e-6)]
OutputPenalty = Annotated[float, Field(ge=-2, le=2), _NUMBER, _REAL]
Bias = Annotated[float, Field(ge=-1e9, le=1e9), _NUMBER, _REAL]
