"""`wsi-train doctor`: what is installed, what works here, what is missing and the command that adds it."""

from wsi_trainer.doctor.check import Check, Status, healthy
from wsi_trainer.doctor.command import doctor, examine

__all__ = ["Check", "Status", "doctor", "examine", "healthy"]
