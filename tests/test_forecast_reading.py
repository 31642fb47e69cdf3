"""Reading series: files as people have them, what is wrong with them, and what their dates tell."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from forecasters import hourly

from femixer.tasks.forecast.data import Reading, Series, read
from femixer.tasks.forecast.data.files import frequency_of, season_of
from femixer.tasks.forecast.model import Sizes, Training, specified


def test_a_series_comes_with_an_installed_package():
    found = read("seattle-temps")
    assert (found.name, found.columns, found.values.shape) == ("seattle-temps", ("temp",), (8759, 1))
    assert (season_of(found.dates), frequency_of(found.dates)) == (24, "h")
    assert found.values[0, 0] == 39.4 and str(found.dates[-1]) == "2010-12-31 23:00:00"


def test_encodings_sentinels_and_dates_of_the_wild_are_read(tmp_path):
    text = (
        "Date Time,T (°C),CO2\n01.02.2020 00:10:00,1.5,-9999\n01.02.2020 00:20:00,,400\n\n13.02.2020 00:10:00,-9,NaN\n"
    )
    form = Reading(date_format="%d.%m.%Y %H:%M:%S")
    for encoding in ("latin-1", "utf-8", "utf-8-sig"):
        (tmp_path / "weather.csv").write_text(text, encoding=encoding)
        found = read(str(tmp_path / "weather"), form)
        assert found.columns == ("T (°C)", "CO2") and found.date_column == "Date Time"
        np.testing.assert_array_equal(found.values, [[1.5, np.nan], [np.nan, 400], [-9, np.nan]])
        assert [str(date) for date in found.dates[[0, 2]]] == ["2020-02-01 00:10:00", "2020-02-13 00:10:00"]
    (tmp_path / "mine.csv").write_text(text)
    assert read(str(tmp_path / "mine.csv"), form).values[0, 1] == -9999
    assert np.isnan(read(str(tmp_path / "mine.csv"), replace(form, missing_below=1.5)).values[0]).all()


def test_parquet_reads_like_csv_and_columns_are_chosen(tmp_path):
    frame = pd.DataFrame({"when": hourly(5), "a": range(5), "b": [True] * 5, "text": list("abcde")})
    frame.to_csv(tmp_path / "x.csv", index=False)
    frame.to_parquet(tmp_path / "y.parquet")
    frame.set_index("when").tz_localize("Europe/Vienna").to_parquet(tmp_path / "z.parquet")
    chosen = Reading(date_column="when", columns=("b", "a"))
    x, y, z = (read(str(tmp_path / name), chosen) for name in ("x", "y", "z.parquet"))
    assert x.fingerprint == y.fingerprint != z.fingerprint
    np.testing.assert_array_equal(z.values, [[1, i] for i in range(5)])
    assert str(z.dates.tz) == "Europe/Vienna"
    with pytest.raises(ValueError, match=r"z.parquet, row 1: text is 'a', which is not a number"):
        read(str(tmp_path / "z.parquet"), Reading("when"))


GOOD = "date,a,b\n2016-07-01,1,2\n2016-07-02,3,4\n"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (GOOD + "2016-07-03,5,x\n", "line 4: b is 'x', which is not a number"),
        (GOOD + "\n2016-07-03,inf,1\n", "line 5: a is inf, which is not a number"),
        (GOOD + "2016-07-03,5\n", "line 4: it has 2 values, and the header names 3"),
        (GOOD + "2016-07-03,5,6,7\n2016-07-04,1,2\n", "line 4: it has 4 values"),
        (GOOD + "tomorrow,5,6\n", "line 4: date is 'tomorrow', which is not a date"),
        (GOOD + ",5,6\n", "line 4: date is missing"),
        (GOOD + "2016-07-02,5,6\n", "line 4: date 2016-07-02 00:00:00 repeats that of line 3; dates must increase"),
        (GOOD + "2016-06-30,5,6\n", "line 4: date 2016-06-30 00:00:00 is before 2016-07-02 00:00:00 of line 3"),
        ('date,a\n2016-07-01,"1\n"\n2016-07-02,x\n', "line 4: a is 'x'"),
        ("date,a,a\n", "line 1: the column 'a' is there twice"),
        ("", "is empty, or begins with an empty line"),
        ("date,a\n", "a file that has rows below its header"),
        ("a,b\n1,2\n", "has no column called date; choose --date-column out of a, b"),
        ("date,time,a\n1,2,3\n", "several columns that could be the dates, date, time"),
        ("date\n2016-07-01\n", "a file with columns besides the dates, separated by commas"),
        ("date,a\n01/02/2016,1\n01/03/2016,1\n", "line 2: date is '01/02/2016', and no row tells day from month"),
        ("date,a\n01/02/16 12:00,1\n01/03/16 12:00,1\n", "say --date-format '%d/%m/%y %H:%M' or '%m/%d/%y %H:%M'"),
        ("1.5,2\n3,4\n", "line 1: it has numbers, and must name the columns"),
        ("date\tsales\n2016-07-01\t950\n2016-07-02\t1,234\n", "line 3: sales is '1,234', which is not a number"),
    ],
)
def test_what_is_wrong_with_a_file_is_said_with_its_line(tmp_path, text, told):
    path = tmp_path / "bad.csv"
    path.write_text(text)
    with pytest.raises(ValueError) as error:  # noqa: PT011 (told says which)
        read(str(path))
    assert told in str(error.value) and "bad.csv" in str(error.value)


@pytest.mark.parametrize("separator", [";", "\t", ","])
@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
def test_other_separators_encodings_and_an_index_are_read(tmp_path, separator, encoding):
    path, dates = tmp_path / "mine.csv", hourly(31)
    frame = pd.DataFrame({"date": dates, "a": np.arange(31) / 4, "b": -np.arange(31.0)})
    decimal = "." if separator == "," else ","
    frame.to_csv(path, sep=separator, decimal=decimal, encoding=encoding)  # with a count of rows in front
    found = read(str(path))
    assert found.columns == ("a", "b") and (found.dates == dates).all()
    np.testing.assert_array_equal(found.values, frame[["a", "b"]])
    frame.set_index(pd.DatetimeIndex(dates))[["a", "b"]].to_csv(path, sep=separator, decimal=decimal, encoding=encoding)
    assert read(str(path)).fingerprint == found.fingerprint  # dates as an index without a name


@pytest.mark.parametrize(
    ("text", "columns", "values"),
    [
        ('date,"temp; roof; north"\n2016-01-01,1\n2016-01-02,2\n', ("temp; roof; north",), [1, 2]),
        ('date;"a,b,c,d"\n2016-01-01;1,5\n2016-01-02;2,5\n', ("a,b,c,d",), [1.5, 2.5]),
        ("date\twind (x,y,z)\n2016-01-01\t0,125\n2016-01-02\t1,250\n", ("wind (x,y,z)",), [0.125, 1.25]),
        (",timestamp,a\n2,2016-01-01,1\n4,2016-01-02,2\n", ("a",), [1, 2]),  # a filtered frame
        (",a\n2001,1\n2002,2\n", ("a",), [1, 2]),  # years
    ],
)
def test_headers_and_indices_of_all_kinds(tmp_path, text, columns, values):
    (tmp_path / "mine.csv").write_text(text)
    found = read(str(tmp_path / "mine.csv"))
    assert found.columns == columns and found.values[:, 0].tolist() == values and len(found.dates) == 2


def test_a_column_of_dates_that_is_named_is_taken(tmp_path):
    (tmp_path / "a.csv").write_text("0,1\n2016-01-01,1\n2016-01-02,2\n")
    assert read(str(tmp_path / "a.csv"), Reading(date_column="0")).columns == ("1",)
    (tmp_path / "a.csv").write_text(",1\n2016-01-01,1\n2016-01-02,2\n")
    assert read(str(tmp_path / "a.csv"), Reading(date_column="Unnamed: 0")).columns == ("1",)


def test_irregular_dates_have_no_frequency_however_long_they_are():
    draw = np.random.default_rng(0)
    seconds = np.cumsum(draw.integers(1, 1800, 2000))
    stamps = np.concatenate([seconds, seconds[-1] + np.arange(1, 11)])  # ten of them a second apart
    assert frequency_of(pd.DatetimeIndex(pd.Timestamp("2020") + pd.to_timedelta(stamps, unit="s"))) is None


def test_offsets_of_summer_and_winter_are_one_time(tmp_path):
    dates = pd.date_range("2020-10-24", periods=61, freq="h", tz="Europe/Berlin")
    pd.DataFrame({"a": np.arange(61.0)}, index=dates).rename_axis("date").to_csv(tmp_path / "a.csv")
    found = read(str(tmp_path / "a.csv"))
    assert (found.dates == dates).all() and frequency_of(found.dates) == "h"


def test_files_of_the_literature_are_read_as_they_are_distributed(tmp_path):
    np.savetxt(tmp_path / "solar_AL.txt", np.arange(24.0).reshape(8, 3), delimiter=",")
    with (tmp_path / "solar_AL.txt").open("a") as file:
        file.write("1,2\n")
    with pytest.raises(ValueError, match="line 9: it has 2 values, not 3"):
        read(str(tmp_path / "solar"))
    np.savetxt(tmp_path / "solar_AL.txt", np.arange(24.0).reshape(8, 3), delimiter=",")
    for data in ("solar", "solar_AL.txt"):
        solar = read(str(tmp_path / data))
        assert solar.name == "solar" and solar.columns == ("0", "1", "2") and solar.values[-1].tolist() == [21, 22, 23]
        assert (season_of(solar.dates), frequency_of(solar.dates)) == (144, "10min")
    weather = tmp_path / "weather.csv"  # which repeats a date
    weather.write_text("date,a\n2020-05-12 05:50,1\n2020-05-12 06:00,-9999\n2020-05-12 06:00,3\n2020-05-12 06:10,4\n")
    assert read(str(weather)).values[:, 0].tolist()[2:] == [3, 4] and np.isnan(read(str(weather)).values[1, 0])
    weather.rename(tmp_path / "mine.csv")
    with pytest.raises(ValueError, match=r"line 4: date .* repeats that of line 3"):
        read(str(tmp_path / "mine.csv"))


def test_the_season_is_that_of_the_dates_whatever_the_file_is_called(tmp_path):
    def season(name, freq):
        found = Series(name, pd.date_range("2020", periods=97, freq=freq), np.ones((97, 1)), ("a",))
        return specified("SeasonalNaive", found, 3, 11, 0, Sizes(), Training()).season

    assert [season("traffic", freq) for freq in ("h", "D", "MS")] == [24, 7, 12]
    assert [season("exchange", freq) for freq in ("h", "D")] == [24, 5]  # its rows are working days


@pytest.mark.parametrize(
    ("dates", "season", "frequency"),
    [
        (hourly(7), 24, "h"),
        (hourly(101).delete(13), 24, "h"),
        (pd.date_range("2020", periods=9, freq="15min"), 96, "15min"),
        (pd.date_range("2020", periods=9, freq="D"), 7, "D"),
        (pd.date_range("2020", periods=97, freq="B"), 5, "B"),
        (pd.date_range("2020", periods=97, freq="B").delete([7, 60, 90]), 5, "B"),
        (pd.date_range("2020", periods=97, freq="B") + pd.Timedelta("16h"), 5, "B"),
        (pd.date_range("2020", periods=41, freq="MS").delete([11, 35]), 12, "MS"),
        (pd.date_range("2020", periods=9, freq="MS"), 12, "MS"),
        (pd.date_range("2020", periods=9, freq="YS"), 1, "YS-JAN"),
        (hourly(1), 1, None),
        (pd.DatetimeIndex(["2020-01-01", "2020-01-03", "2020-01-04", "2020-02-01"]), 1, None),
    ],
)
def test_seasons_and_frequencies_are_told_by_the_dates(dates, season, frequency):
    assert (season_of(dates), frequency_of(dates)) == (season, frequency)
