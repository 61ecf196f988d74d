"""The tasks that come with drot, in the format of lm_eval."""
