import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is there: the workers would fight over the cores

from hypothesis import settings

settings.register_profile("quick", max_examples=25, deadline=None, derandomize=True)
settings.load_profile("quick")
