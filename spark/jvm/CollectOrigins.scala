package penstock

import java.io.{ByteArrayInputStream, ByteArrayOutputStream, DataInputStream, DataOutputStream}
import java.nio.ByteBuffer
import java.nio.charset.StandardCharsets.US_ASCII
import java.util.{Arrays, Base64, TreeMap}

import scala.jdk.CollectionConverters._

import org.apache.spark.sql.catalyst.InternalRow
import org.apache.spark.sql.catalyst.analysis.TypeCheckResult
import org.apache.spark.sql.catalyst.analysis.TypeCheckResult.{TypeCheckFailure, TypeCheckSuccess}
import org.apache.spark.sql.catalyst.expressions.Expression
import org.apache.spark.sql.catalyst.expressions.aggregate.{ImperativeAggregate, TypedImperativeAggregate}
import org.apache.spark.sql.catalyst.trees.BinaryLike
import org.apache.spark.sql.catalyst.util.ArrayData
import org.apache.spark.sql.types.{ArrayType, BinaryType, DataType, LongType, StringType, StructType}
import org.apache.spark.unsafe.types.UTF8String
import org.roaringbitmap.RoaringBitmap

/** `penstock_origins(headers[, minute])`: the origins of all rows, as compressed sets of their numbers.
  *
  * headers: of a record. The first one named `penstock_origin` counts. minute: of the event; null where it is not wanted.
  *
  * The text `malformed valid set set …`, without the sets only numbers of rows. A set is
  * `incarnation:partition:minute:numbers`; the minute may be empty, and the numbers are a portable roaring bitmap in Base64.
  * Rows without such a header are counted nowhere here. `spark/batch_report.py` reads the text.
  *
  * So a task sends the driver a few bytes for a dense run of numbers, however many rows it has.
  */
case class CollectOrigins(
    left: Expression,
    right: Expression,
    mutableAggBufferOffset: Int = 0,
    inputAggBufferOffset: Int = 0
) extends TypedImperativeAggregate[OriginSets]
    with BinaryLike[Expression] {
  override def prettyName: String = "penstock_origins"
  override def dataType: DataType = StringType
  override def nullable: Boolean = false
  override def checkInputDataTypes(): TypeCheckResult = (left.dataType, right.dataType) match {
    case (ArrayType(StructType(Array(name, value)), _), LongType)
        if name.dataType == StringType && value.dataType == BinaryType =>
      TypeCheckSuccess
    case _ => TypeCheckFailure(s"$prettyName takes the headers of a record and a BIGINT")
  }

  override def createAggregationBuffer(): OriginSets = new OriginSets
  override def update(sets: OriginSets, row: InternalRow): OriginSets = {
    val headers = left.eval(row).asInstanceOf[ArrayData]
    val origin = if (headers == null) null else CollectOrigins.find(headers)
    if (origin != null) {
      val minute = right.eval(row)
      sets.add(origin, if (minute == null) OriginSets.NoMinute else minute.asInstanceOf[Long])
    }
    sets
  }
  override def merge(sets: OriginSets, other: OriginSets): OriginSets = sets.merge(other)
  override def eval(sets: OriginSets): Any = UTF8String.fromString(sets.toText)
  override def serialize(sets: OriginSets): Array[Byte] = sets.toBytes
  override def deserialize(bytes: Array[Byte]): OriginSets = OriginSets.fromBytes(bytes)

  override def withNewMutableAggBufferOffset(offset: Int): ImperativeAggregate = copy(mutableAggBufferOffset = offset)
  override def withNewInputAggBufferOffset(offset: Int): ImperativeAggregate = copy(inputAggBufferOffset = offset)
  override protected def withNewChildrenInternal(left: Expression, right: Expression): Expression =
    copy(left = left, right = right)
}

object CollectOrigins {
  private val Name = UTF8String.fromString("penstock_origin")

  private def find(headers: ArrayData): Array[Byte] = {
    var at = 0
    while (at < headers.numElements()) {
      if (!headers.isNullAt(at)) {
        val pair = headers.getStruct(at, 2)
        if (!pair.isNullAt(0) && Name.equals(pair.getUTF8String(0)))
          return if (pair.isNullAt(1)) null else pair.getBinary(1)
      }
      at += 1
    }
    null
  }
}

/** The numbers of origins by incarnation, partition and minute. */
class OriginSets {
  private var malformed, valid = 0L
  private val sets = new TreeMap[String, RoaringBitmap]
  // Rows in a row mostly share all but the number.
  private var lastPrefix = Array.emptyByteArray
  private var lastMinute = OriginSets.NoMinute
  private var lastSet: RoaringBitmap = _

  /** origin: a header's value, `incarnation:partition:number`. */
  def add(origin: Array[Byte], minute: Long): Unit = {
    val end = lastPrefix.length
    val same = lastSet != null && minute == lastMinute && origin.length > end &&
      Arrays.equals(origin, 0, end, lastPrefix, 0, end)
    val number = if (same) OriginSets.number(origin, end) else addFirst(origin, minute)
    if (number < 0) malformed += 1
    else {
      lastSet.add(number.toInt)
      valid += 1
    }
  }

  /** Makes the set of this origin the last one. Returns its number; negative: the origin is malformed. */
  private def addFirst(origin: Array[Byte], minute: Long): Long = {
    val incarnationEnd = OriginSets.skip(origin, 0, 64, byte => (byte >= 'a' && byte <= 'z') || (byte >= '0' && byte <= '9'))
    val partitionEnd = OriginSets.skip(origin, incarnationEnd + 1, 9, byte => byte >= '0' && byte <= '9')
    if (incarnationEnd <= 0 || partitionEnd <= incarnationEnd + 1) return -1
    val number = OriginSets.number(origin, partitionEnd + 1)
    if (number >= 0) {
      val incarnation = new String(origin, 0, incarnationEnd, US_ASCII)
      val partition = new String(origin, incarnationEnd + 1, partitionEnd - incarnationEnd - 1, US_ASCII).toInt
      val place = s"$incarnation:$partition:${if (minute == OriginSets.NoMinute) "" else minute.toString}"
      lastSet = sets.computeIfAbsent(place, _ => new RoaringBitmap)
      lastPrefix = Arrays.copyOf(origin, partitionEnd + 1)
      lastMinute = minute
    }
    number
  }

  def merge(other: OriginSets): OriginSets = {
    malformed += other.malformed
    valid += other.valid
    for ((place, numbers) <- other.sets.asScala) add(place, numbers)
    this
  }

  private def add(place: String, numbers: RoaringBitmap): Unit = {
    val known = sets.putIfAbsent(place, numbers)
    if (known != null) known.or(numbers)
  }

  def toText: String = {
    val text = new StringBuilder().append(malformed).append(' ').append(valid)
    for ((place, numbers) <- sets.asScala) {
      numbers.runOptimize()
      val packed = ByteBuffer.allocate(numbers.serializedSizeInBytes)
      numbers.serialize(packed)
      text.append(' ').append(place).append(':').append(Base64.getEncoder.encodeToString(packed.array))
    }
    text.toString
  }

  def toBytes: Array[Byte] = {
    val bytes = new ByteArrayOutputStream
    val out = new DataOutputStream(bytes)
    out.writeLong(malformed)
    out.writeLong(valid)
    out.writeInt(sets.size)
    for ((place, numbers) <- sets.asScala) {
      numbers.runOptimize()
      out.writeUTF(place)
      numbers.serialize(out)
    }
    bytes.toByteArray
  }
}

object OriginSets {
  val NoMinute: Long = Long.MinValue

  /** As in `services/core/ledger/report.py`. */
  private val MaxNumber = 1L << 31

  def fromBytes(bytes: Array[Byte]): OriginSets = {
    val found = new OriginSets
    val in = new DataInputStream(new ByteArrayInputStream(bytes))
    found.malformed = in.readLong()
    found.valid = in.readLong()
    for (_ <- 0 until in.readInt()) {
      val place = in.readUTF()
      val numbers = new RoaringBitmap
      numbers.deserialize(in)
      found.add(place, numbers)
    }
    found
  }

  /** The place of the colon after 1 to `most` such bytes; negative when there is none. */
  private def skip(origin: Array[Byte], start: Int, most: Int, fits: Byte => Boolean): Int = {
    var at = start
    while (at < origin.length && at - start <= most && fits(origin(at))) at += 1
    if (at > start && at - start <= most && at < origin.length && origin(at) == ':') at else -1
  }

  /** The decimal number from `start` to the end; negative unless it has 1 to 10 digits and is below 2^31. */
  private def number(origin: Array[Byte], start: Int): Long = {
    if (start >= origin.length || origin.length - start > 10) return -1
    var value = 0L
    var at = start
    while (at < origin.length) {
      val digit = origin(at) - '0'
      if (digit < 0 || digit > 9) return -1
      value = value * 10 + digit
      at += 1
    }
    if (value < MaxNumber) value else -1
  }
}
