"""Settings for all tests."""

from hypothesis import HealthCheck, settings

# How long an example takes says how busy the machine is, so it fails nothing.
settings.register_profile("any-machine", deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=50)
settings.load_profile("any-machine")
