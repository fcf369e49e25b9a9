"""Operations on local arrays, each on every backend that it has."""
