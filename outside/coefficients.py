"""Tables that several packages use, and jax_muon does not."""

# J. You's five steps. https://github.com/KellerJordan/modded-nanogpt
YOU = [
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
]
