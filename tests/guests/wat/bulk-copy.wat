;; Allocates 64 MiB, and fills and copies all of it repeatedly.
(module
  ;;! include reward

  (func $odd (param i32)
    (drop (memory.grow (i32.const 1024)))
    (loop $again
      (memory.fill (i32.const 65536) (i32.const 1) (i32.const 0x4000000))
      (memory.copy (i32.const 65536) (i32.const 65540) (i32.const 0x4000000))
      (br $again)))
)
