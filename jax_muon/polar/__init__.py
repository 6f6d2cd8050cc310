"""Polar factors: functions of arrays (..., m, n), and how they are computed."""
