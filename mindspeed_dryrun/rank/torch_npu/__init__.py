"""What a rank on torch_npu needs inside its process: answers for the stand-in CANN, and life without other ranks."""

ENGINE_VARIABLE = "MINDSPEED_DRYRUN_ENGINE"
ENGINE = "torch_npu"
