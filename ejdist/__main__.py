"""`python -m ejdist`: says where the commands are."""

print(
    "ejdist has no command of its own: python -m launch lists the commands, python -m kernels what each operation supports."
)
