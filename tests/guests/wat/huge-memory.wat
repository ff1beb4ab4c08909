;; Declares an initial memory of 4 GiB.
(module
  ;;! include describe
  ;;! include check-settings
  ;;! include range
  ;;! include scores
  (func $odd (param i32))
  (memory (export "memory") 65536)
  (func $allocate (export "cabi_realloc") (param i32 i32 i32 i32) (result i32)
    (i32.const 65536))
)
