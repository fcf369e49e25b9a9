"""Operations on local arrays."""
